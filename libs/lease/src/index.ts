export { LeaseModule, type LeaseAsyncOptions } from './lease.module';
export { InjectLease, getLeaseToken } from './lease.tokens';
export type * from './options/lease-options';
export type { Duration } from './options/duration';

export { JobHandler } from './handlers/job-handler.decorator';
export type {
  CheckpointFormat,
  Handler,
  HandlerClass,
  JobHandlerOptions,
  PayloadOf,
  ResultOf,
} from './handlers/handler.types';
export { Lease } from './handlers/lease';
export { JobInterruptedError, type InterruptionReason } from './claim/interruption';

export { JobsService, type JobId } from './jobs/jobs.service';
export type { EnqueueItem, JobTarget } from './jobs/job-enqueue';
export type { FindJobs, JobFilter, JobPage } from './jobs/job-filter';
export type { SteerManyOptions, SteerOptions, SteerSummary, Steered } from './jobs/job-steering';
export type { WaitOptions } from './jobs/job-waiter';
export type { EnqueueAnswer } from './jobs/enqueuer';
export type { EnqueueOptions, EnqueueTransaction, KeyMode } from './jobs/enqueue-request';
export {
  COMMANDS,
  EVENTS,
  type CommandEffect,
  type JobCommand,
  type JobEvent,
  type JobEventRule,
  placeAfter,
} from './jobs/transitions';
export { BatchesService } from './batches/batches.service';
export { BatchBuilder } from './batches/batch-builder';
export type { BatchSteered } from './batches/batch-steering';
export type * from './batches/batch.types';
export { QueuesService, type QueueInfo, type QueueSettings } from './queues/queues.service';
export type { TransactionTarget } from './storage/caller-transaction';
export type { TransactionOptions } from './handlers/lease-tools';
export {
  JOB_STATES,
  type Job,
  type JobError,
  type JobLogLine,
  type JobProgress,
  type JobSaved,
  type JobRun,
  type JobState,
  type JobStatus,
  type RunOutcome,
} from './jobs/job.types';
export { jobEntity, type JobRow } from './jobs/job.entity';

export { ClaimService, type ClaimOptions, type ClaimedJob } from './claim/claim.service';
export type { LeasedJob } from './claim/leased-job';
export { SettleService } from './settle/settle.service';
export { HeartbeatService } from './heartbeat/heartbeat.service';
export type { AttestResult } from './heartbeat/beat-messages';
export { RescueService, RESCUE_TEXT, type RescueCandidate } from './rescue/rescue.service';
export { LeaderService, type LeaderInfo } from './leader/leader.service';
export { RetentionService, type PruneSummary } from './maintenance/retention.service';
export { LeaderCron } from './leader/leader-cron.decorator';
export { WorkersService, type WorkerIdentity, type WorkerInfo } from './workers/workers.service';
export { WorkerLifecycle } from './workers/worker-lifecycle';
export { LeaseEvents, type LeaseEvent, type RescueCause } from './events/lease-events';

export { leaseMigrations, MIGRATIONS_TABLE } from './storage/migrations';
export { migrationSql } from './storage/migration-sql';
export * from './errors';
