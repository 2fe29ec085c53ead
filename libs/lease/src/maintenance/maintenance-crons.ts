import { Injectable, Logger } from '@nestjs/common';
import { CronExpression } from '@nestjs/schedule';
import { NotRunningError } from '../errors';
import { ThrottledLog } from '../events/throttled-log';
import { LeaderCron } from '../leader/leader-cron.decorator';
import { LeaderService } from '../leader/leader.service';
import { errorText } from '../storage/sql-errors';
import { MaintenanceService } from './maintenance.service';
import { BatchSweep } from '../batches/batch-sweep';
import { RetentionService } from './retention.service';

/** Of each minute; the rest of a long pass waits for the next. */
const PRUNE_MS = 20_000;

/** When the leader does what. Each has a clock of its own: one that fails, or takes long, leaves the others at work (F:G7). */
@Injectable()
export class MaintenanceCrons {
  private readonly trouble = new ThrottledLog(new Logger('Leasehold'), 60_000);

  constructor(
    private readonly maintenance: MaintenanceService,
    private readonly retention: RetentionService,
    private readonly leader: LeaderService,
    private readonly batches: BatchSweep,
  ) {}

  @LeaderCron(CronExpression.EVERY_HOUR)
  keepPartitionsAhead(): Promise<void> {
    return this.attempt('Making partitions', () => this.maintenance.keepPartitionsAhead());
  }

  /** Some minutes after those ahead are made: both need the parent's lock. */
  @LeaderCron('0 5 * * * *')
  dropEmptyDays(): Promise<void> {
    return this.attempt('Dropping empty partitions', () => this.retention.dropEmptyDays());
  }

  @LeaderCron(CronExpression.EVERY_10_MINUTES)
  forgetEndedWorkers(): Promise<void> {
    return this.attempt('Forgetting ended workers', () => this.maintenance.forgetEndedWorkers());
  }

  @LeaderCron(CronExpression.EVERY_MINUTE)
  prune(): Promise<void> {
    return this.attempt('Pruning', () => this.retention.pruneFor(PRUNE_MS, () => this.leader.isLeader));
  }

  @LeaderCron(CronExpression.EVERY_10_SECONDS)
  age(): Promise<void> {
    return this.attempt('Ageing', () => this.maintenance.age());
  }

  @LeaderCron(CronExpression.EVERY_10_SECONDS)
  sweepKeys(): Promise<void> {
    return this.attempt('Sweeping keys', () => this.maintenance.sweepKeys());
  }

  @LeaderCron(CronExpression.EVERY_10_SECONDS)
  promoteWaiting(): Promise<void> {
    return this.attempt('Promoting jobs that wait for a place', () => this.maintenance.promoteWaiting());
  }

  @LeaderCron(CronExpression.EVERY_10_SECONDS)
  sweepBatches(): Promise<void> {
    return this.attempt('Sweeping batches', () => this.batches.sweep());
  }

  private async attempt(what: string, step: () => Promise<unknown>): Promise<void> {
    try {
      await step();
    } catch (error) {
      if (!(error instanceof NotRunningError))
        this.trouble.warn(what, `${what} failed, the next tick goes on: ${errorText(error)}`);
    }
  }
}
