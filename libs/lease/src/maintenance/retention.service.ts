import { Injectable, Logger } from '@nestjs/common';
import { ThrottledLog } from '../events/throttled-log';
import { ResolvedOptions } from '../options/lease-options';
import { Database } from '../storage/database';
import { monotonicMs } from '../storage/delays';
import { isLimit } from '../storage/sql-errors';
import { dropEmptyDaySql, pruneBatchesSql, pruneSql } from './retention.sql';

/** What a pass of retention did. */
export interface PruneSummary {
  /** Jobs deleted, with their runs and checkpoints. */
  deleted: number;
  /** Past their time and kept all the same: a foreign key holds them, or somebody has them locked just now. */
  held: number;
}

/** Jobs that one statement looks at: 5 ms of the server, or 20 ms if it deletes them all (seen: 200 000 in 2.7 s, each with a run and a checkpoint). */
const BATCH = 1000;
/** After a pass comes a rest of so many times what it took, so that looking at what is kept for long costs a twentieth of a session. */
const REST = 20;
const LONGEST_REST_MS = 3_600_000;

interface BatchRow extends Record<string, unknown> {
  deleted: number;
  held: number;
  why: string | null;
  from: string | null;
  after: string | null;
}

/** A walk through the finished jobs, the oldest day first. */
interface Pass extends PruneSummary {
  from: string;
  after: string;
  limit: number;
  tookMs: number;
}

const newPass = (): Pass => ({ from: '-infinity', after: '0', limit: BATCH, deleted: 0, held: 0, tookMs: 0 });

/**
 * Deletes finished jobs that are past their time (`retention`, or their queue's own), and the partitions that are empty then. The leader does
 * it every minute; it may be done by hand from any process, also by several at once. Never deletes a job that has not finished,
 * nor one that a foreign key of another table holds.
 */
@Injectable()
export class RetentionService {
  private readonly trouble = new ThrottledLog(new Logger('Leasehold'), 60_000);
  /** The leader's pass; it may take several ticks. */
  private pass = newPass();
  private restUntil = 0;

  constructor(
    private readonly database: Database,
    private readonly options: ResolvedOptions,
  ) {}

  /** One whole pass, in short transactions. @throws what a batch fails with; those before it stay done */
  async prune(): Promise<PruneSummary> {
    const pass = newPass();
    while (!(await this.batch(pass)));
    await this.pruneBatches(pass);
    return { deleted: pass.deleted, held: pass.held };
  }

  /**
   * Goes on with a pass that is kept from call to call, for `forMs` and while `goesOn`. When it is done the next one begins after a rest, in
   * proportion to the time that it took.
   * @returns jobs deleted
   */
  async pruneFor(forMs: number, goesOn: () => boolean = () => true): Promise<number> {
    const until = monotonicMs() + forMs;
    const before = this.pass.deleted;
    if (monotonicMs() < this.restUntil) return 0;
    while (goesOn() && monotonicMs() < until) {
      if (!(await this.batch(this.pass))) continue;
      await this.pruneBatches(this.pass, goesOn);
      const { deleted, tookMs } = this.pass;
      this.pass = newPass();
      this.restUntil = monotonicMs() + Math.min(tookMs * REST, LONGEST_REST_MS);
      return deleted - before;
    }
    return this.pass.deleted - before;
  }

  /** Drops the days of finished jobs that are over and empty. @returns their tables' names */
  async dropEmptyDays(): Promise<string[]> {
    for (const names: string[] = []; ;) {
      const [row] = await this.database.query<{ name: string | null }>(dropEmptyDaySql(this.database.schema.quoted));
      if (!row?.name) return names;
      names.push(row.name);
    }
  }

  /** Batches that ended long enough ago, each as a whole, by the module's times. */
  private async pruneBatches(pass: Pass, goesOn: () => boolean = () => true): Promise<void> {
    const { completedMs, failedMs, cancelledMs } = this.options.retention;
    const began = monotonicMs();
    for (let at: [string, string] | undefined = ['-infinity', '0']; at && goesOn();) {
      const [row]: BatchRow[] = await this.database.query<BatchRow>(pruneBatchesSql(this.database.schema.quoted), [
        completedMs,
        failedMs,
        cancelledMs,
        ...at,
      ]);
      pass.deleted += row?.deleted ?? 0;
      pass.held += row?.held ?? 0;
      at = row?.from && row.after !== null ? [row.from, row.after] : undefined;
    }
    pass.tookMs += monotonicMs() - began;
  }

  /** @returns whether it was the last one of the pass */
  private async batch(pass: Pass): Promise<boolean> {
    const { completedMs, failedMs, cancelledMs } = this.options.retention;
    const began = monotonicMs();
    try {
      const [row] = await this.database.query<BatchRow>(pruneSql(this.database.schema.quoted), [
        completedMs,
        failedMs,
        cancelledMs,
        pass.from,
        pass.after,
        pass.limit,
      ]);
      pass.limit = Math.min(BATCH, pass.limit * 2);
      pass.deleted += row?.deleted ?? 0;
      pass.held += row?.held ?? 0;
      if (row?.why) this.trouble.warn('refused', `Finished jobs past their time could not be deleted: ${row.why}`);
      if (!row?.from || row.after === null) return true;
      pass.from = row.from;
      pass.after = row.after;
      return false;
    } catch (error) {
      // Less at once: a foreign key without an index of its own, or rows of many megabytes.
      if (!isLimit(error) || pass.limit === 1) throw error;
      pass.limit = Math.ceil(pass.limit / 10);
      return false;
    } finally {
      pass.tookMs += monotonicMs() - began;
    }
  }
}
