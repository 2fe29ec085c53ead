import { Injectable } from '@nestjs/common';
import { InvalidBatchError, UnknownBatchError, WaitTimeoutError } from '../errors';
import { LeaseEvents } from '../events/lease-events';
import { JOB_STATES, type JobState } from '../jobs/job.types';
import { type Duration, parseDuration } from '../options/duration';
import { Database } from '../storage/database';
import { didYouMean } from '../options/suggest';
import { monotonicMs, sleep } from '../storage/delays';
import type { BatchId, BatchInfo, BatchPage, BatchSummary, FindBatches, MemberResult } from './batch.types';
import { assertBatchId } from './batch-id';
import { batchSql, findBatchesSql, resultsSql } from './batches.sql';

const PAGE = 500;
const WAIT_MS = 30_000;
const LOOK_MS = [50, 100, 250, 500, 1000];
const STATUSES = ['running', 'completed', 'failed', 'cancelled'];

type Row = BatchSummary & { counts: Partial<Record<JobState, number>>; members: number; now: Date };

/** Reads batches: each answer is one statement over all state tables, so that no member is counted twice or missed while it moves. */
@Injectable()
export class BatchReader {
  constructor(
    private readonly database: Database,
    private readonly events: LeaseEvents,
  ) {}

  async get(id: BatchId): Promise<BatchInfo> {
    assertBatchId(id);
    const [row] = await this.database.query<Row & Record<string, unknown>>(batchSql(this.s), [id], {
      name: 'leasehold_batch',
    });
    if (!row) throw new UnknownBatchError(id);
    return infoOf(row);
  }

  async find({ status, name, limit = 50, after, ...others }: FindBatches): Promise<BatchPage> {
    const [other] = Object.keys(others);
    if (other !== undefined) {
      const known = ['status', 'name', 'limit', 'after'];
      throw new InvalidBatchError(`batches are not found by '${other}'${didYouMean(other, known)}`, other);
    }
    if (status !== undefined && !STATUSES.includes(status)) {
      throw new InvalidBatchError(`status = ${JSON.stringify(status)} is none of ${STATUSES.join(', ')}`, 'status');
    }
    if (!Number.isInteger(limit) || limit < 1 || limit > 1000) {
      throw new InvalidBatchError(`limit = ${limit} must be a whole number from 1 to 1000`, 'limit');
    }
    if (after !== undefined) assertBatchId(after, 'after');
    const rows = await this.database.query<BatchSummary & Record<string, unknown>>(findBatchesSql(this.s), [
      status ?? null,
      name ?? null,
      after ?? null,
      limit + 1,
    ]);
    const batches: BatchSummary[] = rows.slice(0, limit);
    return { batches, next: rows.length > limit ? (batches.at(-1)?.id ?? null) : null };
  }

  /** Members that have ended, read page by page as they are asked for. */
  async *results<R>(id: BatchId): AsyncGenerator<MemberResult<R>, void, undefined> {
    await this.get(id);
    for (let after = '0'; ;) {
      const rows = await this.database.query<
        Omit<MemberResult<R>, 'state'> & { state: MemberResult['state'] | null } & Record<string, unknown>
      >(resultsSql(this.s), [id, after, PAGE]);
      for (const { state, ...row } of rows) if (state !== null) yield { ...row, state };
      const last = rows.at(-1);
      if (!last || rows.length < PAGE) return;
      after = last.jobId;
    }
  }

  async waitFor(id: BatchId, timeout: Duration = WAIT_MS): Promise<BatchInfo> {
    const timeoutMs = parseDuration(timeout);
    if (timeoutMs === undefined)
      throw new InvalidBatchError(`timeout = ${JSON.stringify(timeout)} is no duration`, 'timeout');
    const ends = monotonicMs() + timeoutMs;
    // An end that this process brings about is heard of at once; any other is found by looking.
    for (let looks = 0; ; looks++) {
      const heard = new AbortController();
      const stream = this.events.stream.subscribe((event) => {
        if (event.type === 'batch.finished' && event.batchId === id) heard.abort();
      });
      try {
        const batch = await this.get(id);
        if (batch.finishedAt) return batch;
        const leftMs = ends - monotonicMs();
        if (leftMs <= 0) throw new WaitTimeoutError(`of batch ${id}`, batch.status, timeoutMs);
        await sleep(Math.min(leftMs, LOOK_MS[Math.min(looks, LOOK_MS.length - 1)] ?? 1000), heard.signal);
      } finally {
        stream.unsubscribe();
      }
    }
  }

  private get s(): string {
    return this.database.schema.quoted;
  }
}

function infoOf({ counts: given, members, now, ...batch }: Row): BatchInfo {
  const counts = Object.fromEntries(JOB_STATES.map((state) => [state, given[state] ?? 0])) as Record<JobState, number>;
  counts.completed = members - JOB_STATES.reduce((sum, state) => sum + counts[state], 0);
  const ended = counts.completed + counts.failed + counts.cancelled;
  const tookMs = now.getTime() - batch.since.getTime();
  const goesOn = batch.status === 'running' && batch.sealed && batch.generation === 1 && ended > 0 && ended < members;
  return {
    ...batch,
    status: members === 0 && batch.status === 'running' ? 'untouched' : batch.status,
    failing: counts.failed > 0,
    counts,
    members,
    done: members === 0 ? (batch.finishedAt ? 1 : 0) : ended / members,
    estimatedEnd: goesOn ? new Date(now.getTime() + (tookMs * (members - ended)) / ended) : null,
  };
}
