export { LeaseModule, type LeaseAsyncOptions } from './lease.module';
export { InjectLease, getLeaseToken } from './lease.tokens';
export type * from './options/lease-options';
export type { Duration } from './options/duration';

export { JobHandler } from './handlers/job-handler.decorator';
export type { Handler, HandlerClass, JobHandlerOptions, PayloadOf, ResultOf } from './handlers/handler.types';
export { Lease } from './handlers/lease';
export { JobInterruptedError, type InterruptionReason } from './claim/interruption';

export { JobsService, type EnqueueItem, type FindJobs, type JobId, type JobPage } from './jobs/jobs.service';
export type { EnqueueOptions, EnqueueTransaction } from './jobs/enqueue-request';
export {
  JOB_STATES,
  type Job,
  type JobError,
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
export { LeaderCron } from './leader/leader-cron.decorator';
export { WorkersService, type WorkerIdentity, type WorkerInfo } from './workers/workers.service';
export { WorkerLifecycle } from './workers/worker-lifecycle';
export { LeaseEvents, type LeaseEvent, type RescueCause } from './events/lease-events';

export { leaseMigrations, MIGRATIONS_TABLE } from './storage/migrations';
export { migrationSql } from './storage/migration-sql';
export * from './errors';
