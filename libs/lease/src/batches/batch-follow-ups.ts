import { Injectable, Logger } from '@nestjs/common';
import { HeldLeases } from '../claim/held-leases';
import { list } from '../claim/step-values';
import { WakeUp } from '../claim/wake-up';
import { LeaseEvents } from '../events/lease-events';
import { ThrottledLog } from '../events/throttled-log';
import { Database } from '../storage/database';
import { backoffMs, sleep } from '../storage/delays';
import { errorText, isConflict, isConnectionError, isLimit } from '../storage/sql-errors';
import type { BatchEnd } from './batch.types';
import { afterMembersSql } from './batches.sql';

const MAX_JOBS = 5000;
/** Of a batch that somebody has locked: most likely another process that looks at it too. */
const BUSY_MIN_MS = 20;
const BUSY_MAX_MS = 1000;
/** How often a plain batch is looked at while this process holds more of its members. */
const PLAIN_MS = 200;
const PLAIN_KNOWN = 10_000;

/** A member that has ended with one that it needs. */
export type DoomedMember = [
  jobId: string,
  kind: string,
  queue: string,
  attempt: number,
  reason: string,
  state: 'failed' | 'cancelled',
];

/** A batch that has ended, as the database says it. */
export type EndedBatch = [batchId: string, status: BatchEnd['status'], name: string, generation: number];

interface Answer {
  busy: string[];
  again: [batchId: string, jobIds: string[]][];
  doomed: DoomedMember[];
  stop: string[];
  plain: string[];
  ended: EndedBatch[];
}

/** Members that have ended, by batch. */
type Due = Map<string, Set<string>>;

/**
 * What follows when members of batches have ended, after the commit that says so: others may start, or fail with them, or the batch is at its end. Those that
 * end while one look is on the wire share the next. What a crash leaves undone, the leader's sweep does.
 */
@Injectable()
export class BatchFollowUps {
  private readonly trouble = new ThrottledLog(new Logger('Leasehold'));
  private due: Due = new Map();
  /** Batches of whose members nothing follows but, perhaps, the batch's end. */
  private readonly plain = new Set<string>();
  private plainDue = new Set<string>();
  private plainTimer: NodeJS.Timeout | undefined;
  private running: Promise<void> | undefined;
  /** Looks at batches that somebody has locked, and the cancelling of those that fail fast. */
  private readonly later = new Set<Promise<void>>();
  /** Looks in a row that found something locked. */
  private busy = 0;
  private readonly stopping = new AbortController();
  private cancel: (batchId: string) => Promise<unknown> = () => Promise.resolve();

  constructor(
    private readonly database: Database,
    private readonly wakeUp: WakeUp,
    private readonly events: LeaseEvents,
    private readonly held: HeldLeases,
  ) {}

  /** Who cancels what is left of a batch that fails fast. */
  onStop(cancel: (batchId: string) => Promise<unknown>): void {
    this.cancel = cancel;
  }

  /** A member has ended, or (without a job) the batch is to be looked at. */
  ended(batchId: string, jobId?: string): void {
    if (this.stopping.signal.aborted) return;
    // Its end is not near: most likely one of those that are held here is the last. A look at each would walk over all that have ended since the one before.
    const plain = this.plain.has(batchId);
    if (jobId !== undefined && plain && this.held.countOf(batchId) > 0) return this.lookSoon(batchId);
    if (plain) this.plainDue.delete(batchId);
    let jobs = this.due.get(batchId);
    if (!jobs) this.due.set(batchId, (jobs = new Set()));
    if (jobId !== undefined && !plain) jobs.add(jobId);
    this.running ??= this.run().finally(() => {
      this.running = undefined;
      if (this.due.size > 0 && !this.stopping.signal.aborted) this.look();
    });
  }

  /** Resolves when everything that has ended by now is followed up. */
  async idle(): Promise<void> {
    this.lookAtPlain();
    while (this.running || this.later.size > 0) await Promise.all([this.running, ...this.later]);
  }

  stop(): void {
    clearTimeout(this.plainTimer);
    this.plainDue.clear();
    this.stopping.abort();
    this.due.clear();
  }

  announceDoomed(doomed: DoomedMember[]): void {
    for (const [jobId, kind, queue, attempt, reason, state] of doomed) {
      this.wakeUp.ended(jobId);
      if (state === 'failed')
        this.events.emit({ type: 'job.finally-failed', reason, jobId, kind, queue, attempt, workerId: '', token: '' });
    }
  }

  announceEnd([batchId, status, name, generation]: EndedBatch): void {
    this.events.emit({ type: 'batch.finished', batchId, name, status, generation });
  }

  private lookSoon(batchId: string): void {
    this.plainDue.add(batchId);
    this.plainTimer ??= setTimeout(() => this.lookAtPlain(), PLAIN_MS).unref();
  }

  private lookAtPlain(): void {
    clearTimeout(this.plainTimer);
    this.plainTimer = undefined;
    const due = this.plainDue;
    this.plainDue = new Set();
    for (const batchId of due) this.ended(batchId);
  }

  private look(): void {
    const [first] = this.due.keys();
    if (first !== undefined) this.ended(first);
  }

  private async run(): Promise<void> {
    // What ends in this turn goes together.
    await new Promise<void>((resolve) => setImmediate(resolve));
    for (let failures = 0; this.due.size > 0 && !this.stopping.signal.aborted;) {
      const part = this.take();
      try {
        await this.lookAt(part);
        failures = 0;
      } catch (error) {
        this.putBack(part);
        this.trouble.warn('batches', `Could not look after batches, trying again: ${errorText(error)}`);
        await sleep(backoffMs(failures++, 20, 2000), this.stopping.signal);
      }
    }
  }

  private async lookAt(part: Due): Promise<void> {
    let answer: Answer | undefined;
    try {
      [answer] = (
        await this.database.query<{ answer: Answer }>(
          afterMembersSql(this.database.schema.quoted),
          [list([...part.keys()]), list([...part.values()].flatMap((jobs) => [...jobs]))],
          { name: 'leasehold_after_members' },
        )
      ).map((row) => row.answer);
    } catch (error) {
      if (isConnectionError(error) || isConflict(error) || isLimit(error)) throw error;
      // The database will not have what one of them does at its end (a constraint or a trigger of the user's): that is no trouble of the others. The sweep comes again.
      if (part.size > 1) for (const [batchId, jobs] of part) await this.lookAt(new Map([[batchId, jobs]]));
      else this.trouble.warn('refused', `Batch ${[...part.keys()].join()} cannot go on: ${errorText(error)}`);
    }
    if (answer) this.receive(part, answer);
  }

  private take(): Due {
    const part: Due = new Map();
    let count = 0;
    for (const [batchId, jobs] of this.due) {
      if (count > 0 && count + jobs.size > MAX_JOBS) break;
      part.set(batchId, jobs);
      this.due.delete(batchId);
      count += jobs.size;
    }
    return part;
  }

  private putBack(part: Due): void {
    for (const [batchId, jobs] of part) {
      const known = this.due.get(batchId);
      if (known) for (const job of jobs) known.add(job);
      else this.due.set(batchId, jobs);
    }
  }

  private receive(part: Due, { busy, again, doomed, stop, plain, ended }: Answer): void {
    this.announceDoomed(doomed);
    if (this.plain.size > PLAIN_KNOWN) this.plain.clear();
    for (const batchId of plain) this.plain.add(batchId);
    this.putBack(new Map(again.map(([batchId, jobIds]) => [batchId, new Set(jobIds)])));
    if (busy.length > 0) this.lookLater(new Map(busy.map((batchId) => [batchId, part.get(batchId) ?? new Set()])));
    else this.busy = 0;
    for (const batchId of stop) this.cancelRest(batchId);
    for (const end of ended) {
      this.plain.delete(end[0]);
      this.announceEnd(end);
    }
  }

  private cancelRest(batchId: string): void {
    const work = this.cancel(batchId)
      .catch((error: unknown) =>
        this.trouble.warn('cancel', `Could not cancel the rest of batch ${batchId}: ${errorText(error)}`),
      )
      .then(() => void this.later.delete(work));
    this.later.add(work);
  }

  private lookLater(part: Due): void {
    const waits = sleep(backoffMs(this.busy++, BUSY_MIN_MS, BUSY_MAX_MS), this.stopping.signal).then(() => {
      this.later.delete(waits);
      if (this.stopping.signal.aborted) return;
      this.putBack(part);
      this.look();
    });
    this.later.add(waits);
  }
}
