import type { ClaimRequest } from './claim-request';
import type { HeldLease } from './held-leases';
import type { LeasedJob } from './leased-job';
import { monotonicMs } from '../storage/delays';

const RATE_WINDOW_MS = 200;
/** The buffer holds what the slots will start within about this time. */
const BUFFER_AHEAD_MS = 40;

/** Room of one kind: its limit, what runs, and what was claimed ahead. */
class KindSlots {
  running = 0;
  /** Asked for by claims that are on the wire. */
  expected = 0;
  buffer: HeldLease[] = [];
  /** Where the buffer begins: what was taken is cut off now and then. */
  private head = 0;
  /** After a give-back nothing is claimed ahead until a slot has freed. */
  bufferless = false;
  private ends = 0;
  private windowFrom = monotonicMs();
  private ratePerMs = 0;

  constructor(
    readonly limit: number,
    /** What is claimed ahead would hold places that others in the fleet wait for. */
    private readonly exact: boolean,
  ) {}

  get buffered(): number {
    return this.buffer.length - this.head;
  }

  get first(): HeldLease | undefined {
    return this.buffer[this.head];
  }

  start(): void {
    this.running++;
    this.head++;
    if (this.head < this.buffer.length && this.head < 1000) return;
    this.buffer = this.buffer.slice(this.head);
    this.head = 0;
  }

  /** Takes out what was claimed before; claims nothing ahead until a slot has freed, if that was anything. */
  takeStale(claimedBefore: number): HeldLease[] {
    const waiting = this.buffer.slice(this.head);
    const stale = waiting.filter((held) => held.job.claimedAtMs < claimedBefore);
    if (stale.length === 0) return stale;
    this.bufferless = true;
    this.buffer = waiting.filter((held) => held.job.claimedAtMs >= claimedBefore);
    this.head = 0;
    return stale;
  }

  ended(): void {
    this.running--;
    this.ends++;
    this.bufferless = false;
  }

  /** How many jobs to hold ahead of free slots, from the recent rate. */
  ahead(max: number): number {
    if (this.bufferless || this.exact) return 0;
    const now = monotonicMs();
    const elapsed = now - this.windowFrom;
    if (elapsed >= RATE_WINDOW_MS) {
      this.ratePerMs = this.ends / elapsed;
      this.ends = 0;
      this.windowFrom = now;
    }
    const rate = Math.max(this.ratePerMs, elapsed > 1 ? this.ends / Math.max(elapsed, BUFFER_AHEAD_MS) : 0);
    return Math.min(max, Math.floor(rate * BUFFER_AHEAD_MS));
  }
}

export interface SlotLimits {
  /** Of each kind. */
  kinds: ReadonlyMap<string, number>;
  /** Of the whole process. */
  total: number;
  /** Jobs claimed ahead, at most. */
  bufferMax: number;
  /** Kinds of which nothing is claimed ahead. */
  exact?: ReadonlySet<string>;
  /** Of the queues that have a limit of their own here. */
  queues?: Readonly<Record<string, number>>;
}

/** Counts what runs and what is buffered, per kind, per queue and in the whole process, and says what there is room for. */
export class Slots {
  private readonly kinds = new Map<string, KindSlots>();
  private readonly total: number;
  private readonly bufferMax: number;
  /** Of limited queues: what may be added; what is asked for by claims on the wire counts as there. */
  private readonly queueRooms: Map<string, number>;
  running = 0;
  private buffered = 0;
  private expected = 0;

  constructor({ kinds, total, bufferMax, exact, queues = {} }: SlotLimits) {
    this.total = total;
    this.bufferMax = bufferMax;
    this.queueRooms = new Map(Object.entries(queues));
    for (const [kind, limit] of kinds) this.kinds.set(kind, new KindSlots(limit, exact?.has(kind) ?? false));
  }

  get free(): boolean {
    return this.running < this.total;
  }

  /** Jobs of this kind that may be claimed now: free slots, and some ahead of them. */
  room(kind: string): number {
    const slots = this.kinds.get(kind);
    if (!slots) return 0;
    const waiting = slots.buffered + slots.expected;
    const free = slots.limit - slots.running - waiting;
    const ahead = slots.ahead(this.bufferMax);
    const room = Math.max(0, free + ahead);
    // Small top-ups of the buffer are not worth a claim; free slots are.
    return free <= 0 && room < ahead / 4 ? 0 : room;
  }

  /** Jobs of this queue that may be claimed now, nothing ahead; null if it has no limit here. */
  roomIn(queue: string): number | null {
    const room = this.queueRooms.get(queue);
    return room === undefined ? null : Math.max(0, room);
  }

  private takeRoom(queue: string, count: number): void {
    const room = this.queueRooms.get(queue);
    if (room !== undefined) this.queueRooms.set(queue, room - count);
  }

  /** The same over all kinds. */
  roomInAll(): number {
    let ahead = 0;
    for (const slots of this.kinds.values()) ahead += slots.ahead(this.bufferMax);
    return Math.max(0, this.total - this.running - this.buffered - this.expected + Math.min(this.bufferMax, ahead));
  }

  /** A claim was sent (1), or its reply has come (-1): its jobs have their places meanwhile. */
  expect({ want, lanes, limits, queueLimits }: ClaimRequest, sign: 1 | -1): void {
    this.expected += sign * want;
    const roomOf = new Map(lanes.map(([queue], i) => [queue, queueLimits?.[i] ?? 0]));
    for (const [queue, room] of roomOf) this.takeRoom(queue, sign * Math.min(want, room));
    const limitOf = new Map(lanes.map(([, kind], i) => [kind, limits[i] ?? 0]));
    for (const [kind, limit] of limitOf) {
      const slots = this.kinds.get(kind);
      if (slots) slots.expected += sign * limit;
    }
  }

  put(held: HeldLease): boolean {
    const slots = this.kinds.get(held.job.kind);
    if (!slots) return false;
    slots.buffer.push(held);
    this.takeRoom(held.job.queue, 1);
    this.buffered++;
    return true;
  }

  /** The next job to start, if its kind and the process have a slot: highest priority first, then oldest. */
  take(): HeldLease | undefined {
    if (!this.free) return undefined;
    let best: KindSlots | undefined;
    for (const slots of this.kinds.values()) {
      const { first } = slots;
      if (!first || slots.running >= slots.limit) continue;
      if (!best?.first || comesBefore(first, best.first)) best = slots;
    }
    const held = best?.first;
    if (!best || !held) return undefined;
    best.start();
    this.running++;
    this.buffered--;
    return held;
  }

  ended({ kind, queue }: LeasedJob): void {
    this.kinds.get(kind)?.ended();
    this.takeRoom(queue, -1);
    this.running--;
  }

  /** Takes out of the buffers what was claimed before `claimedBefore` (monotonic ms); their kinds then claim nothing ahead. */
  takeStale(claimedBefore: number): HeldLease[] {
    const stale = [...this.kinds.values()].flatMap((slots) => slots.takeStale(claimedBefore));
    this.buffered -= stale.length;
    for (const { job } of stale) this.takeRoom(job.queue, -1);
    return stale;
  }
}

const comesBefore = (a: HeldLease, b: HeldLease): boolean =>
  a.job.priority !== b.job.priority ? a.job.priority < b.job.priority : a.job.createdAt < b.job.createdAt;
