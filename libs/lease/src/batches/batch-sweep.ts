import { Injectable, Logger } from '@nestjs/common';
import { ThrottledLog } from '../events/throttled-log';
import { Database } from '../storage/database';
import { monotonicMs, within } from '../storage/delays';
import { BatchFollowUps } from './batch-follow-ups';
import { BatchSteering } from './batch-steering';
import { sweepSql } from './batches.sql';

/** Batches, and members that wait for others, that one tick looks at. */
const LOOKED_AT = 500;
/** Younger than this is still on its way. */
const GRACE_MS = 5000;
const FORGET_MS = 60_000;
/** How long a tick waits for its repairs: members of a large batch that fails fast are cancelled for longer. */
const IDLE_MS = 10_000;

interface Left extends Record<string, unknown> {
  ended: string[];
  ofJobs: string[];
  jobs: string[];
  stop: string[];
  lastBatch: string | null;
  lastJob: string | null;
}

/** Repairs what a crash between a commit and the look after it has left (F:K1); the leader's cron calls it. */
@Injectable()
export class BatchSweep {
  /** What this process has found and repaired: batches not ended, edges not followed. More than none says that a process died just then. */
  repaired = 0;

  private readonly trouble = new ThrottledLog(new Logger('Leasehold'), 60_000);
  private from = { batch: '0', job: '0' };
  /** Batches that were seen at their end, and when: whoever ended the last member may still be on his way to say so. */
  private readonly seen = new Map<string, number>();

  constructor(
    private readonly database: Database,
    private readonly followUps: BatchFollowUps,
    private readonly steering: BatchSteering,
  ) {}

  /** Looks at what comes next, then begins again. @returns repairs */
  async sweep(graceMs = GRACE_MS): Promise<number> {
    const [left] = await this.database.query<Left>(sweepSql(this.database.schema.quoted), [
      this.from.batch,
      this.from.job,
      LOOKED_AT,
      graceMs,
    ]);
    if (!left) return 0;
    this.from = { batch: left.lastBatch ?? '0', job: left.lastJob ?? '0' };
    const ended = this.old(left.ended, graceMs);
    for (const batchId of ended) this.followUps.ended(batchId);
    left.ofJobs.forEach((jobId, i) => this.followUps.ended(left.jobs[i] ?? '0', jobId));
    for (const batchId of left.stop) await this.steering.goOnCancelling(batchId);
    const repaired = new Set([...ended, ...left.jobs]).size;
    this.repaired += repaired;
    if (repaired > 0) this.trouble.warn('batches', `${repaired} batches had members whose end nobody had followed up`);
    await within(IDLE_MS, this.followUps.idle());
    return repaired;
  }

  private old(ended: string[], graceMs: number): string[] {
    const now = monotonicMs();
    for (const [batchId, at] of this.seen) if (now - at > FORGET_MS) this.seen.delete(batchId);
    for (const batchId of ended) if (!this.seen.has(batchId)) this.seen.set(batchId, now);
    return ended.filter((batchId) => now - (this.seen.get(batchId) ?? now) >= graceMs);
  }
}
