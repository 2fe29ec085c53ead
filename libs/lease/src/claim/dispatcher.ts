import { Injectable } from '@nestjs/common';
import { LeaseEvents, jobRef } from '../events/lease-events';
import { HeartbeatService } from '../heartbeat/heartbeat.service';
import type { HandlerDefinition } from '../handlers/handler-registry';
import { Runner } from '../handlers/runner';
import { ResolvedOptions } from '../options/lease-options';
import { monotonicMs } from '../storage/delays';
import type { ClaimReply, ClaimRequest, Claimer } from './claim-request';
import { Exchange } from './exchange';
import { type HeldLease, HeldLeases } from './held-leases';
import { Lanes } from './lanes';
import { Slots } from './slots';

const REFUSED_PAUSE_MS = 250;
/** Jobs that one claim may bring: larger ones gain nothing, and keep their connection from settling. */
const MAX_CLAIM = 500;
/** While a claim is on the wire another one is worth its round trip only for this many. */
const MIN_SECOND_CLAIM = 200;

type KindLimits = Pick<HandlerDefinition, 'kind' | 'concurrency' | 'fleetConcurrency' | 'concurrencyKey'>;

/**
 * Claims what this process will start at once, and starts it. Free slots plus a small buffer sized from the recent rate; what has not
 * started after `buffer.age` goes back. A suspect gets the process to itself.
 */
@Injectable()
export class Dispatcher implements Claimer {
  private slots = new Slots({ kinds: new Map(), total: 0, bufferMax: 0 });
  private fleetLimits = new Map<string, number | null>();
  private workerId: string | undefined;
  private accepting = false;
  private housekeeping: NodeJS.Timeout | undefined;
  private suspectsSeenAt: number | undefined;
  /** Claims on the wire, with what had been heard of the lanes when they were sent. */
  private readonly asked = new Map<ClaimRequest, number>();
  private readonly running = new Set<HeldLease>();
  private endWaiters: (() => void)[] = [];
  private pausedUntil = 0;
  private starting = false;
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

  /** Begins (or after a fence: goes on) to claim for this worker, by its kinds' limits, here and in the whole fleet. `onRefused`: the database holds the worker for dead. */
  open(workerId: string, definitions: readonly KindLimits[], onRefused: () => void): void {
    const first = this.workerId === undefined;
    const limits = new Map(definitions.map(({ kind, concurrency }) => [kind, concurrency]));
    this.workerId = workerId;
    this.accepting = true;
    this.onRefused = onRefused;
    this.fleetLimits = new Map(definitions.map(({ kind, fleetConcurrency }) => [kind, fleetConcurrency ?? null]));
    if (first) {
      const { concurrency, buffer } = this.options;
      const exact = definitions.filter((d) => d.fleetConcurrency !== undefined || d.concurrencyKey !== undefined);
      this.slots = new Slots({
        kinds: limits,
        total: concurrency,
        bufferMax: buffer.max,
        exact: new Set(exact.map(({ kind }) => kind)),
        queues: this.options.queueConcurrency,
      });
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
    while (this.running.size > 0) await new Promise<void>((resolve) => this.endWaiters.push(resolve));
  }

  next(): ClaimRequest | undefined {
    if (!this.accepting || this.workerId === undefined || this.held.holdsSuspect || !this.heartbeat.trusted)
      return undefined;
    if (monotonicMs() < this.pausedUntil) return undefined;
    for (const { suspects } of this.asked.keys()) if (suspects > 0) return undefined; // It may bring one that is to run alone.
    const idle = this.held.size === 0 && this.running.size === 0 && this.asked.size === 0;
    // Not while a handler that lost its lease runs on: it might for ever, and the suspects are for other processes then.
    if (!idle && this.suspectsWaitTooLong && !this.hasAbandoned) return undefined;
    const suspects: 0 | 1 | 2 = !idle || !this.lanes.hasSuspects ? 0 : this.suspectsWaitTooLong ? 2 : 1;
    const lanes = this.lanes
      .toClaim(suspects)
      .filter(([queue, kind]) => this.slots.room(kind) > 0 && this.slots.roomIn(queue) !== 0);
    const ofKinds = [...new Set(lanes.map(([, kind]) => kind))].reduce((sum, kind) => sum + this.slots.room(kind), 0);
    const want = Math.min(this.slots.roomInAll(), ofKinds, MAX_CLAIM);
    if (lanes.length === 0 || want < (this.asked.size > 0 ? MIN_SECOND_CLAIM : 1)) return undefined;
    const limits = lanes.map(([, kind]) => Math.min(want, this.slots.room(kind)));
    const queueLimits = lanes.map(([queue]) => this.slots.roomIn(queue));
    const fleet = lanes.map(([, kind]) => this.fleetLimits.get(kind) ?? null);
    const request: ClaimRequest = { workerId: this.workerId, want, lanes, limits, queueLimits, fleet, suspects };
    this.asked.set(request, this.lanes.heardOf);
    this.slots.expect(request, 1);
    return request;
  }

  receive(request: ClaimRequest, reply: ClaimReply): void {
    const heardOf = this.asked.get(request) ?? 0;
    this.asked.delete(request);
    this.slots.expect(request, -1);
    if (!reply.ok) {
      if (!reply.refused) return;
      // Expired or declared dead: the next beat knows which. Asking again before would be a busy loop.
      this.pausedUntil = monotonicMs() + REFUSED_PAUSE_MS;
      setTimeout(() => this.exchange.wake(), REFUSED_PAUSE_MS + 1).unref();
      if (request.workerId === this.workerId) this.onRefused();
      return;
    }
    const { leases } = reply;
    if (request.workerId !== this.workerId) {
      // Claimed under an identity that was lost meanwhile: others may have these jobs already, or soon.
      for (const { job } of leases) void this.exchange.settle(job, { event: 'giveback' });
      return;
    }
    const { lanes, suspects } = request;
    this.lanes.empty(suspects === 2 ? lanes : reply.empty, heardOf, suspects, leases.length > 0);
    const announce = this.events.wants('job.claimed');
    for (const held of leases) {
      if (announce) this.events.emit({ type: 'job.claimed', ...jobRef(held.job) });
      if (!this.slots.put(held)) void this.exchange.settle(held.job, { event: 'giveback' });
    }
    if (!this.accepting) this.giveBack(Infinity);
    this.startBuffered();
  }

  private startBuffered(): void {
    for (let held = this.slots.take(); held; held = this.slots.take()) {
      if (held.interrupted) {
        // Lost or to be stopped before it began: no run.
        this.slots.ended(held.job);
        void this.exchange.settle(held.job, { event: 'giveback' });
        continue;
      }
      this.running.add(held);
      void this.runner.run(held, this.onEnd);
    }
  }

  private readonly onEnd = (held: HeldLease): void => {
    this.running.delete(held);
    this.slots.ended(held.job);
    if (this.running.size === 0) for (const resolve of this.endWaiters.splice(0)) resolve();
    this.scheduleStart();
  };

  /** On the next turn: what ends in this one frees its slots together. */
  private scheduleStart(): void {
    if (this.starting) return;
    this.starting = true;
    queueMicrotask(() => {
      this.starting = false;
      this.startBuffered();
      this.exchange.wake();
    });
  }

  private keepHouse(): void {
    this.giveBack(monotonicMs() - this.options.buffer.ageMs);
    let stuck = 0;
    for (const held of this.running) if (held.interrupted) stuck++;
    this.heartbeat.stuck = stuck;
    if (!this.lanes.hasSuspects) this.suspectsSeenAt = undefined;
    else this.suspectsSeenAt ??= monotonicMs();
  }

  private giveBack(claimedBefore: number): void {
    for (const { job } of this.slots.takeStale(claimedBefore)) void this.exchange.settle(job, { event: 'giveback' });
  }

  /** Handlers whose lease is gone and that have not ended. */
  private get hasAbandoned(): boolean {
    for (const { job } of this.running) if (!this.held.get(job.key)) return true;
    return false;
  }

  private get suspectsWaitTooLong(): boolean {
    return this.suspectsSeenAt !== undefined && monotonicMs() - this.suspectsSeenAt >= this.options.suspects.patienceMs;
  }
}
