import { Injectable } from '@nestjs/common';
import { CronExpression } from '@nestjs/schedule';
import { LeaderCron } from '../leader/leader-cron.decorator';
import { Database } from '../storage/database';
import { WorkersService } from '../workers/workers.service';

/** Days of partitions kept ahead, so that a fortnight without a leader does no harm; a settle that finds none makes it. */
const PARTITION_DAYS = 14;

/** What the leader does besides rescuing. Each is idempotent and safe with two leaders at once. */
@Injectable()
export class MaintenanceService {
  constructor(
    private readonly database: Database,
    private readonly workers: WorkersService,
  ) {}

  @LeaderCron(CronExpression.EVERY_HOUR)
  async keepPartitionsAhead(): Promise<void> {
    await this.database.query(`SELECT ${this.database.schema.quoted}.ensure_partitions_v1($1)`, [PARTITION_DAYS]);
  }

  @LeaderCron(CronExpression.EVERY_10_MINUTES)
  async forgetEndedWorkers(): Promise<void> {
    await this.workers.forgetEnded();
  }
}
