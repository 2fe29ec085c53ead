import { Injectable } from '@nestjs/common';
import { IllegalBatchStateError, JobContendedError, UnknownBatchError } from '../errors';
import { JobSteering, type SteerOptions, type SteerSummary, assertReason } from '../jobs/job-steering';
import type { JobCommand } from '../jobs/transitions';
import { Database } from '../storage/database';
import { backoffMs, sleep } from '../storage/delays';
import type { BatchId } from './batch.types';
import { BatchFollowUps } from './batch-follow-ups';
import { assertBatchId } from './batch-id';
import { deleteBatchSql, failedMembersSql, statusSql, stopSql } from './batches.sql';
import { CANCELLED } from './stop-reasons';

const PART = 10_000;
const DELETE_TRIES = 5;
/** A delete of many members takes as long as that. */
const DELETE_MS = 120_000;

/** How many members a command has changed. */
export type BatchSteered = Omit<SteerSummary, 'next'>;

/** Commands for all members of a batch; each member is moved for itself, so one that is moved meanwhile is no trouble of the others. */
@Injectable()
export class BatchSteering {
  constructor(
    private readonly steering: JobSteering,
    private readonly followUps: BatchFollowUps,
    private readonly database: Database,
  ) {
    followUps.onStop((batchId) => this.goOnCancelling(batchId));
  }

  /**
   * Cancels what is unfinished, a running member by request. The batch is marked first: from then on nothing can be added, and who waits for
   * a member that was cancelled is cancelled too, not failed.
   */
  async cancel(id: BatchId, options: SteerOptions = {}): Promise<BatchSteered> {
    assertBatchId(id);
    assertReason(options.reason);
    const reason = options.reason ?? CANCELLED;
    const rows = await this.database.query(stopSql(this.s), [id, reason]);
    if (rows.length === 0) await this.assertKnown(id);
    const done = await this.each('cancel', id, { reason });
    this.followUps.ended(id);
    return done;
  }

  /** What is unfinished of a batch that is being cancelled: all, or what a crash, or a member that was just moving, has left. */
  async goOnCancelling(id: BatchId): Promise<void> {
    const [batch] = await this.database.query<{ stopping: boolean; stopReason: string | null }>(statusSql(this.s), [
      id,
    ]);
    // It may have ended meanwhile, and begun again.
    if (batch?.stopping) await this.each('cancel', id, { reason: batch.stopReason ?? CANCELLED });
  }

  /** Those that failed, and those that did not run since another failed; in the order of their ids, so that none comes before what it needs. */
  async retryFailed(id: BatchId): Promise<BatchSteered> {
    await this.assertKnown(id);
    const sum: BatchSteered = { changed: 0, requested: 0, unchanged: 0, skipped: 0 };
    for (let after = '0'; ;) {
      const rows = await this.database.query<{ id: string }>(failedMembersSql(this.s), [id, after, PART]);
      const part = await this.steering.these(
        'retry',
        rows.map((row) => row.id),
      );
      add(sum, part);
      after = rows.at(-1)?.id ?? after;
      if (rows.length < PART) return sum;
    }
  }

  async steer(command: JobCommand, id: BatchId): Promise<BatchSteered> {
    await this.assertKnown(id);
    return this.each(command, id);
  }

  /** @returns members deleted */
  async delete(id: BatchId): Promise<number> {
    assertBatchId(id);
    for (let tries = 0; ; tries++) {
      const [row] = await this.database.query<{ answer: string; deleted: number }>(deleteBatchSql(this.s), [id], {
        timeoutMs: DELETE_MS,
      });
      switch (row?.answer) {
        case 'deleted':
          return row.deleted;
        case 'running':
          throw new IllegalBatchStateError(id, 'running', 'it cannot be deleted before it has ended; cancel it first');
        case 'referenced':
          throw new IllegalBatchStateError(id, 'ended', 'a foreign key of another table holds one of its members');
        case 'contended':
          if (tries >= DELETE_TRIES) throw new JobContendedError(`of batch ${id}`);
          await sleep(backoffMs(tries, 50, 1000));
          break;
        default:
          throw new UnknownBatchError(id);
      }
    }
  }

  private async each(command: JobCommand, batchId: BatchId, options: SteerOptions = {}): Promise<BatchSteered> {
    const sum: BatchSteered = { changed: 0, requested: 0, unchanged: 0, skipped: 0 };
    for (let after: string | undefined; ;) {
      const part = await this.steering.many(
        command,
        { batchId },
        { ...options, limit: PART, ...(after === undefined ? {} : { after }) },
      );
      add(sum, part);
      if (part.next === null) return sum;
      after = part.next;
    }
  }

  private async assertKnown(id: BatchId): Promise<void> {
    assertBatchId(id);
    if ((await this.database.query(statusSql(this.s), [id])).length === 0) throw new UnknownBatchError(id);
  }

  private get s(): string {
    return this.database.schema.quoted;
  }
}

function add(sum: BatchSteered, part: BatchSteered): void {
  for (const key of ['changed', 'requested', 'unchanged', 'skipped'] as const) sum[key] += part[key];
}
