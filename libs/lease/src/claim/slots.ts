import type { HeldLease } from './held-leases';
import { monotonicMs } from '../storage/delays';

const RATE_WINDOW_MS = 200;
/** The buffer holds what the slots will start within about this time. */
const BUFFER_AHEAD_MS = 20;

/** Room of one kind: its limit, what runs, and what was claimed ahead. */
class KindSlots {
  running = 0;
  readonly buffer: HeldLease[] = [];
  /** After a give-back nothing is claimed ahead until a slot has freed. */
  bufferless = false;
  private ends = 0;
  private windowFrom = monotonicMs();
  private ratePerMs = 0;

  constructor(readonly limit: number) {}

  started(): void {
    this.running++;
  }

  ended(): void {
    this.running--;
    this.ends++;
    this.bufferless = false;
  }

  /** How many jobs to hold ahead of free slots, from the recent rate. */
  ahead(max: number): number {
    if (this.bufferless) return 0;
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

/** Counts what runs and what is buffered, per kind and in the whole process, and says what there is room for. */
export class Slots {
  private readonly kinds = new Map<string, KindSlots>();
  running = 0;
  buffered = 0;

  constructor(
    limits: Map<string, number>,
    private readonly total: number,
    private readonly bufferMax: number,
  ) {
    for (const [kind, limit] of limits) this.kinds.set(kind, new KindSlots(limit));
  }

  get free(): boolean {
    return this.running < this.total;
  }

  /** Jobs of this kind that may be claimed now: free slots, and some ahead of them. */
  room(kind: string): number {
    const slots = this.kinds.get(kind);
    if (!slots) return 0;
    const free = slots.limit - slots.running - slots.buffer.length;
    const ahead = slots.ahead(this.bufferMax);
    // Small top-ups of the buffer are not worth a claim; free slots are.
    if (free <= 0 && slots.buffer.length > ahead / 2) return 0;
    return Math.max(0, free + ahead);
  }

  /** The same over all kinds. */
  roomInAll(): number {
    let ahead = 0;
    for (const slots of this.kinds.values()) ahead += slots.ahead(this.bufferMax);
    return Math.max(0, this.total - this.running - this.buffered + Math.min(this.bufferMax, ahead));
  }

  put(held: HeldLease): boolean {
    const slots = this.kinds.get(held.job.kind);
    if (!slots) return false;
    slots.buffer.push(held);
    this.buffered++;
    return true;
  }

  /** The next job to start, if its kind and the process have a slot: highest priority first, then oldest. */
  take(): HeldLease | undefined {
    if (!this.free) return undefined;
    let best: KindSlots | undefined;
    for (const slots of this.kinds.values()) {
      const [first] = slots.buffer;
      if (!first || slots.running >= slots.limit) continue;
      const [rival] = best?.buffer ?? [];
      if (!rival || comesBefore(first, rival)) best = slots;
    }
    const held = best?.buffer.shift();
    if (!best || !held) return undefined;
    best.started();
    this.running++;
    this.buffered--;
    return held;
  }

  ended(kind: string): void {
    this.kinds.get(kind)?.ended();
    this.running--;
  }

  /** Takes out of the buffers what was claimed before `claimedBefore` (monotonic ms); their kinds then claim nothing ahead. */
  takeStale(claimedBefore: number): HeldLease[] {
    const stale: HeldLease[] = [];
    for (const slots of this.kinds.values()) {
      const old = slots.buffer.filter((held) => held.job.claimedAtMs < claimedBefore);
      if (old.length === 0) continue;
      slots.bufferless = true;
      const keep = slots.buffer.filter((held) => held.job.claimedAtMs >= claimedBefore);
      slots.buffer.splice(0, slots.buffer.length, ...keep);
      stale.push(...old);
    }
    this.buffered -= stale.length;
    return stale;
  }
}

const comesBefore = (a: HeldLease, b: HeldLease): boolean =>
  a.job.priority !== b.job.priority ? a.job.priority < b.job.priority : a.job.createdAt < b.job.createdAt;
