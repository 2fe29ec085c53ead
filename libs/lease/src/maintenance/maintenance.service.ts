import { Injectable, Logger } from '@nestjs/common';
import { ThrottledLog } from '../events/throttled-log';
import { Database } from '../storage/database';
import { WorkersService } from '../workers/workers.service';
import { ageSql, ensurePartitionsSql, promoteWaitingSql, sweepKeysSql } from './maintenance.sql';

/** Days of partitions kept ahead, so that a fortnight without a leader does no harm; a settle that finds none makes it. */
const PARTITION_DAYS = 14;
/** Jobs of one lane that one tick raises. */
const AGE_BATCH = 1000;
/** Keys that one tick looks at: a million are gone through in half an hour. */
const KEYS_BATCH = 5000;
/** Concurrency keys that one tick looks at. */
const PLACES_BATCH = 200;

/** What is done besides rescuing, a step at a time. Each is idempotent and safe with two at once; the leader's crons call them. */
@Injectable()
export class MaintenanceService {
  /** Keys that this process found held by no unfinished job, and let go. Settling does that; more than none says that something was missed. */
  keysRepaired = 0;

  private readonly trouble = new ThrottledLog(new Logger('Leasehold'), 60_000);
  private keysFrom: { space: string; key: string } = { space: '', key: '' };
  private placesFrom = '';

  constructor(
    private readonly database: Database,
    private readonly workers: WorkersService,
  ) {}

  async keepPartitionsAhead(): Promise<void> {
    await this.database.query(ensurePartitionsSql(this.s), [PARTITION_DAYS]);
  }

  async forgetEndedWorkers(): Promise<void> {
    await this.workers.forgetEnded();
  }

  /** Raises jobs that have been ready for their queue's `ageing`. @returns jobs raised */
  async age(): Promise<number> {
    const [row] = await this.database.query<{ moved: number }>(ageSql(this.s), [AGE_BATCH]);
    return row?.moved ?? 0;
  }

  /** Repairs the keys that come next, then begins again. @returns keys repaired */
  async sweepKeys(): Promise<number> {
    const { space, key } = this.keysFrom;
    const [row] = await this.database.query<{ repaired: number; space: string | null; key: string | null }>(
      sweepKeysSql(this.s),
      [space, key, KEYS_BATCH],
    );
    this.keysFrom = { space: row?.space ?? '', key: row?.key ?? '' };
    const repaired = row?.repaired ?? 0;
    this.keysRepaired += repaired;
    if (repaired > 0)
      this.trouble.warn('keys', `${repaired} unique keys were held by no unfinished job, and are free now`);
    return repaired;
  }

  /** Gives free places to jobs that wait for one, of the concurrency keys that come next, then begins again. @returns jobs promoted */
  async promoteWaiting(): Promise<number> {
    const [row] = await this.database.query<{ promoted: number; key: string | null }>(promoteWaitingSql(this.s), [
      this.placesFrom,
      PLACES_BATCH,
    ]);
    this.placesFrom = row?.key ?? '';
    return row?.promoted ?? 0;
  }

  private get s(): string {
    return this.database.schema.quoted;
  }
}
