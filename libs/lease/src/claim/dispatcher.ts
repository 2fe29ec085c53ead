import { Injectable } from '@nestjs/common';
import { LeaseEvents } from '../events/lease-events';
import { HeartbeatService } from '../heartbeat/heartbeat.service';
import { Runner, ref } from '../handlers/runner';
import { ResolvedOptions } from '../options/lease-options';
import { monotonicMs } from '../storage/delays';
import { type ClaimReply, type ClaimRequest, type Claimer, Exchange } from './exchange';
import { type HeldLease, HeldLeases } from './held-leases';
import { Lanes } from './lanes';
import { Slots } from './slots';
import type { Lane } from './wake-up';

const REFUSED_PAUSE_MS = 250;

/**
 * Claims what this process will start at once, and starts it. Free slots plus a small buffer sized from the recent rate; what has not
 * started after `buffer.age` goes back. A suspect gets the process to itself.
 */
@Injectable()
export class Dispatcher implements Claimer {
  private slots = new Slots(new Map(), 0, 0);
  private workerId: string | undefined;
  private accepting = false;
  private housekeeping: NodeJS.Timeout | undefined;
  private suspectsSeenAt: number | undefined;
  private asked: { lanes: Lane[]; generation: number } | undefined;
  private readonly running = new Map<Promise<void>, HeldLease>();
  private pausedUntil = 0;
  private onRefused: () => void = () => undefined;

  constructor(
    private readonly lanes: Lanes,
    private readonly exchange: Exchange,
    private readonly held: HeldLeases,
    private readonly runner: Runner,
    private readonly options: ResolvedOptions,
    private readonly heartbeat: HeartbeatService,
    private readonly events: LeaseEvents,
  ) {}

  /** Jobs whose handlers run now, including those whose lease is lost. */
  get runningCount(): number {
    return this.running.size;
  }

  /** Begins (or after a fence: goes on) to claim for this worker. `onRefused`: the database holds the worker for dead. */
  open(workerId: string, limits: Map<string, number>, onRefused: () => void): void {
    const first = this.workerId === undefined;
    this.workerId = workerId;
    this.accepting = true;
    this.onRefused = onRefused;
    if (first) {
      const { concurrency, buffer } = this.options;
      this.slots = new Slots(limits, concurrency, buffer.max);
      this.lanes.start([...limits.keys()], () => this.exchange.wake());
      this.housekeeping = setInterval(() => this.keepHouse(), Math.max(20, buffer.ageMs / 4));
    }
    this.exchange.setClaimer(this);
    this.lanes.pollNow();
  }

  /** Stops claiming. A claim on the wire is still received, and given back. */
  close(): void {
    this.accepting = false;
  }

  /** Ends the polling too, and gives back whatever has not started. */
  async stop(): Promise<void> {
    this.close();
    // Handlers that ignore a drain's abort are still counted, for as long as they run.
    this.housekeeping?.unref();
    void this.allEnded().then(() => clearInterval(this.housekeeping));
    await this.lanes.stop();
    this.giveBack(Infinity);
    this.exchange.setClaimer(undefined);
    this.workerId = undefined;
  }

  /** Resolves when no handler runs any more. */
  async allEnded(): Promise<void> {
    while (this.running.size > 0) await Promise.allSettled(this.running.keys());
  }

  next(): ClaimRequest | undefined {
    if (!this.accepting || this.workerId === undefined || this.held.holdsSuspect || !this.heartbeat.trusted)
      return undefined;
    if (monotonicMs() < this.pausedUntil) return undefined;
    const idle = this.held.size === 0 && this.running.size === 0;
    // Not while a handler that lost its lease runs on: it might for ever, and the suspects are for other processes then.
    if (!idle && this.suspectsWaitTooLong && !this.hasAbandoned) return undefined;
    const suspects = !idle || !this.lanes.hasSuspects ? 0 : this.suspectsWaitTooLong ? 2 : 1;
    const lanes = this.lanes.toClaim(suspects).filter(([, kind]) => this.slots.room(kind) > 0);
    const want = Math.min(this.slots.roomInAll(), this.options.concurrency + this.options.buffer.max);
    if (lanes.length === 0 || want === 0) return undefined;
    this.asked = { lanes, generation: this.lanes.generation };
    return {
      workerId: this.workerId,
      want,
      queues: lanes.map(([queue]) => queue),
      kinds: lanes.map(([, kind]) => kind),
      limits: lanes.map(([, kind]) => Math.min(want, this.slots.room(kind))),
      suspects,
    };
  }

  receive(request: ClaimRequest, reply: ClaimReply): void {
    if (!reply.ok) {
      if (!reply.refused) return;
      // Expired or declared dead: the next beat knows which. Asking again before would be a busy loop.
      this.pausedUntil = monotonicMs() + REFUSED_PAUSE_MS;
      setTimeout(() => this.exchange.wake(), REFUSED_PAUSE_MS + 1).unref();
      if (request.workerId === this.workerId) this.onRefused();
      return;
    }
    const { jobs } = reply;
    if (request.workerId !== this.workerId) {
      // Claimed under an identity that was lost meanwhile: others may have these jobs already, or soon.
      for (const job of jobs) void this.exchange.settle(job, { event: 'giveback' });
      return;
    }
    this.markEmptied(request, reply);
    for (const job of jobs) {
      const held = this.held.get(job.key);
      if (!held) continue;
      if (this.events.wants('job.claimed')) this.events.emit({ type: 'job.claimed', ...ref(job) });
      if (!this.slots.put(held)) void this.exchange.settle(job, { event: 'giveback' });
    }
    if (!this.accepting) this.giveBack(Infinity);
    this.startBuffered();
  }

  /** A kind that brought less than there was room for has no more, unless the claim was cut short for its size. */
  private markEmptied(request: ClaimRequest, { jobs, bytes }: ClaimReply & { ok: true }): void {
    if (!this.asked || jobs.length >= request.want || (jobs.length > 0 && bytes >= this.options.claim.maxBytes / 2))
      return;
    const counts = new Map<string, number>();
    for (const { kind } of jobs) counts.set(kind, (counts.get(kind) ?? 0) + 1);
    const limits = new Map(request.kinds.map((kind, i) => [kind, request.limits[i] ?? 0]));
    this.lanes.empty(
      this.asked.lanes.filter(([, kind]) => (counts.get(kind) ?? 0) < (limits.get(kind) ?? 0)),
      this.asked.generation,
    );
  }

  private startBuffered(): void {
    for (let held = this.slots.take(); held; held = this.slots.take()) {
      const { job } = held;
      if (held.interrupted) {
        // Lost or to be stopped before it began: no run.
        this.slots.ended(job.kind);
        void this.exchange.settle(job, { event: 'giveback' });
        continue;
      }
      const run = this.runner.run(held).finally(() => {
        this.running.delete(run);
        this.slots.ended(job.kind);
        this.startBuffered();
        this.exchange.wake();
      });
      this.running.set(run, held);
    }
  }

  private keepHouse(): void {
    this.giveBack(monotonicMs() - this.options.buffer.ageMs);
    let stuck = 0;
    for (const held of this.running.values()) if (held.interrupted) stuck++;
    this.heartbeat.stuck = stuck;
    if (!this.lanes.hasSuspects) this.suspectsSeenAt = undefined;
    else this.suspectsSeenAt ??= monotonicMs();
  }

  private giveBack(claimedBefore: number): void {
    for (const { job } of this.slots.takeStale(claimedBefore)) void this.exchange.settle(job, { event: 'giveback' });
  }

  /** Handlers whose lease is gone and that have not ended. */
  private get hasAbandoned(): boolean {
    for (const { job } of this.running.values()) if (!this.held.get(job.key)) return true;
    return false;
  }

  private get suspectsWaitTooLong(): boolean {
    return this.suspectsSeenAt !== undefined && monotonicMs() - this.suspectsSeenAt >= this.options.suspects.patienceMs;
  }
}
