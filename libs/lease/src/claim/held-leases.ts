import { Injectable } from '@nestjs/common';
import { JobInterruptedError, type InterruptionReason } from './interruption';
import type { LeasedJob } from './leased-job';
import { monotonicMs } from '../storage/delays';

/** Deadlines nearer than this get a timer of their own; the others wait for the next look. */
const TIMER_AHEAD_MS = 2000;
const LOOK_EVERY_MS = 1000;

/** Whoever works under a lease, told of what happens to it. */
export interface LeaseWatcher {
  /** The deadline has passed. Called once. */
  deadlinePassed(lease: HeldLease): void;
  /** The job was interrupted. Called once. */
  interrupted?(lease: HeldLease, reason: InterruptionReason): void;
  /** The lease is gone, and the job's completion not known to be committed. */
  goneWhileCompleting?(lease: HeldLease): void;
}

/** One lease held by this process, from the claim's reply until its outcome is answered. */
export class HeldLease {
  private interruption: JobInterruptedError | undefined;
  /** Made when somebody asks for the signal: most handlers of short jobs never do, and it costs more than all the rest. */
  private controller: AbortController | undefined;
  private timer: NodeJS.Timeout | undefined;
  private watcher: LeaseWatcher | undefined;
  private deadlinePassed = false;
  private extending = 0;
  /** The deadline on this process's monotonic clock; null = none. */
  private endsAtMs: number | null;
  /** Its job is completed in a transaction of the handler's, which has not committed yet. */
  completing = false;
  /** How often a completion of it was begun or written: whoever asked before knows nothing of it. */
  completions = 0;
  /** Its job was completed in a transaction of the handler's, which has committed. */
  settled = false;
  /** An outcome is on its way: "gone" is then no news. */
  settling = false;
  /** It has saved something; what it saved last may still be on its way. */
  saving = false;
  /** No longer ours; whatever is written for it is refused. */
  lost = false;
  /** Its outcome was answered. */
  ended = false;

  constructor(readonly job: LeasedJob) {
    this.endsAtMs = job.deadlineMs === null ? null : job.claimedAtMs + job.deadlineMs;
    this.deadlineAt = job.deadlineAt;
  }

  /** By the database's clock. */
  deadlineAt: Date | null;

  get signal(): AbortSignal {
    if (!this.controller) {
      this.controller = new AbortController();
      if (this.interruption) this.controller.abort(this.interruption);
    }
    return this.controller.signal;
  }

  get interrupted(): InterruptionReason | undefined {
    return this.interruption?.reason;
  }

  /** Throws why the handler should stop, if it should. */
  throwIfInterrupted(): void {
    if (this.interruption) throw this.interruption;
  }

  /** Milliseconds to the deadline on this process's monotonic clock; Infinity if there is none. */
  get remainingMs(): number {
    return this.endsAtMs === null ? Infinity : Math.max(0, this.endsAtMs - monotonicMs());
  }

  /** Until the database has answered whether it moves the deadline, that does not pass here. */
  async whileExtending(extend: () => Promise<void>): Promise<void> {
    this.extending++;
    try {
      await extend();
    } finally {
      this.extending--;
      this.armDeadline();
    }
  }

  /** The database has moved the deadline: on this process's monotonic clock, and on its own. */
  extended(endsAtMs: number, deadlineAt: Date): void {
    this.deadlineAt = deadlineAt;
    if (this.endsAtMs === null || endsAtMs <= this.endsAtMs) return;
    this.endsAtMs = endsAtMs;
    if (this.timer) clearTimeout(this.timer);
    this.timer = undefined;
    this.armDeadline();
  }

  interrupt(reason: InterruptionReason, detail?: string): void {
    if (reason === 'lease-lost') this.lost = true;
    if (this.interruption) return;
    this.interruption = new JobInterruptedError(this.job.id, reason, detail);
    this.controller?.abort(this.interruption);
    this.watcher?.interrupted?.(this, reason);
  }

  /** The database does not know the lease any more. While an outcome is on its way, that only says that it has arrived. */
  gone(): void {
    if (this.completing) this.watcher?.goneWhileCompleting?.(this);
    else if (!this.settling) this.interrupt('lease-lost');
  }

  /** One watcher for all leases, where it can: a callback for each costs more than parsing the job. */
  watch(watcher: LeaseWatcher): void {
    this.watcher = watcher;
    this.armDeadline();
  }

  /** Most jobs end long before: a timer for each would cost more than claiming it. */
  armDeadline(): void {
    if (!this.watcher || this.timer || this.extending > 0 || this.deadlinePassed || this.endsAtMs === null) return;
    const remaining = this.remainingMs;
    if (remaining <= 0) return this.passDeadline();
    if (remaining > TIMER_AHEAD_MS) return;
    this.timer = setTimeout(() => {
      this.timer = undefined;
      this.armDeadline();
    }, Math.ceil(remaining));
    this.timer.unref();
  }

  /** Its completion was rolled back: it is still to be settled, and by its deadline if that has passed meanwhile. */
  reopen(): void {
    this.completing = false;
    this.settling = false;
    if (this.deadlinePassed) this.watcher?.deadlinePassed(this);
  }

  private passDeadline(): void {
    this.deadlinePassed = true;
    this.watcher?.deadlinePassed(this);
  }

  /** Nobody is told of anything any more. */
  unwatch(): void {
    this.watcher = undefined;
    if (this.timer) clearTimeout(this.timer);
    this.timer = undefined;
  }
}

/** What a beat attests: pairs sorted by token, and the claim number below which every reply has arrived. */
export interface Attested {
  jobs: string[];
  tokens: string[];
  below: string;
}

/** Every lease that this process believes it holds. The beats compare this list with the database's. */
@Injectable()
export class HeldLeases {
  private readonly leases = new Map<string, HeldLease>();
  private readonly ofBatches = new Map<string, number>();
  private readonly unanswered = new Set<number>();
  private lastClaimNo = 0;
  private suspects = 0;
  private looking: NodeJS.Timeout | undefined;

  get size(): number {
    return this.leases.size;
  }

  get holdsSuspect(): boolean {
    return this.suspects > 0;
  }

  /** Numbers a claim before it is sent. */
  openClaim(): number {
    this.unanswered.add(++this.lastClaimNo);
    return this.lastClaimNo;
  }

  /** The reply has arrived (call it after adding the jobs), or will never be waited for again. */
  closeClaim(claimNo: number): void {
    this.unanswered.delete(claimNo);
  }

  add(job: LeasedJob): HeldLease {
    const lease = new HeldLease(job);
    this.leases.set(job.key, lease);
    if (job.suspect) this.suspects++;
    if (job.batchId !== null) this.ofBatches.set(job.batchId, this.countOf(job.batchId) + 1);
    this.looking ??= setInterval(() => this.lookAtDeadlines(), LOOK_EVERY_MS).unref();
    return lease;
  }

  get(key: string): HeldLease | undefined {
    return this.leases.get(key);
  }

  remove(lease: HeldLease): void {
    lease.unwatch();
    lease.ended = true;
    if (!this.leases.delete(lease.job.key)) return;
    if (lease.job.suspect) this.suspects--;
    const { batchId } = lease.job;
    if (batchId === null) return;
    if (this.countOf(batchId) > 1) this.ofBatches.set(batchId, this.countOf(batchId) - 1);
    else this.ofBatches.delete(batchId);
  }

  /** Members of a batch that are held here. */
  countOf(batchId: string): number {
    return this.ofBatches.get(batchId) ?? 0;
  }

  private lookAtDeadlines(): void {
    for (const lease of this.leases.values()) lease.armDeadline();
    if (this.leases.size > 0) return;
    clearInterval(this.looking);
    this.looking = undefined;
  }

  all(): IterableIterator<HeldLease> {
    return this.leases.values();
  }

  attested(workerId: string): Attested {
    const mine = [...this.leases.values()].filter(({ job }) => job.workerId === workerId);
    const pairs = mine
      .map(({ job }) => [BigInt(job.token), job] as const)
      .sort(([a], [b]) => (a < b ? -1 : a > b ? 1 : 0));
    return {
      jobs: pairs.map(([, job]) => job.id),
      tokens: pairs.map(([, job]) => job.token),
      // Claims are numbered one by one, so the lowest that is still out bounds all that may be on the wire.
      below: String(Math.min(this.lastClaimNo + 1, ...this.unanswered)),
    };
  }
}
