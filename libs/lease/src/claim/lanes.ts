import { Injectable, Logger } from '@nestjs/common';
import { ThrottledLog } from '../events/throttled-log';
import { ResolvedOptions } from '../options/lease-options';
import { Database } from '../storage/database';
import { monotonicMs, sleep } from '../storage/delays';
import { errorText } from '../storage/sql-errors';
import { pollSql } from './poll.sql';
import { type Lane, WakeUp } from './wake-up';

const PROMOTE_LIMIT = 500;
/** Looking for lanes may take this part of the time: dead rows that an old snapshot keeps can make it dear. */
const LOOK_SHARE = 1 / 20;

/**
 * Which lanes (queue, kind) hold something for this worker. Learnt from a poll, once a second and whenever the next scheduled job is due,
 * and sooner from wake-ups. A lane that a claim found empty is left alone until either says otherwise; the generation tells whether
 * one did while that claim was on the wire.
 */
@Injectable()
export class Lanes {
  private readonly trouble = new ThrottledLog(new Logger('Leasehold'));
  private full = new Map<string, Lane>();
  private suspects = new Map<string, Lane>();
  /** Every lane that ever held something for this worker. */
  private readonly known = new Map<string, Lane>();
  private lookAfter = 0;
  private kinds: string[] = [];
  private stopping = new AbortController();
  private nap = new AbortController();
  private running: Promise<void> | undefined;
  private onFound: () => void = () => undefined;
  /** Grows with everything that is heard of lanes. */
  generation = 0;

  constructor(
    private readonly database: Database,
    private readonly options: ResolvedOptions,
    private readonly wakeUp: WakeUp,
  ) {}

  /** Starts polling for these kinds; `onFound` is called whenever there may be something to claim. */
  start(kinds: string[], onFound: () => void): void {
    this.kinds = kinds;
    this.onFound = onFound;
    this.stopping = new AbortController();
    this.wakeUp.onWakeUp((lanes) => this.heard(lanes));
    this.running = this.run(this.stopping.signal);
  }

  async stop(): Promise<void> {
    this.stopping.abort();
    this.nap.abort();
    await this.running;
  }

  /** Lanes to claim from; `suspects` as in ClaimRequest: 0 = without those that hold only suspects, 2 = only with suspects. */
  toClaim(suspects: 0 | 1 | 2): Lane[] {
    const lanes = new Map(suspects === 2 ? [] : this.full);
    if (suspects > 0) for (const [key, lane] of this.suspects) lanes.set(key, lane);
    return [...lanes.values()];
  }

  get hasSuspects(): boolean {
    return this.suspects.size > 0;
  }

  /** A claim brought less than it asked for: nothing more is there, unless something was heard since it was sent. */
  empty(asked: Lane[], generation: number): void {
    if (generation !== this.generation) return;
    for (const lane of asked) {
      this.full.delete(keyOf(lane));
      this.suspects.delete(keyOf(lane));
    }
  }

  /** Looks again at once. */
  pollNow(): void {
    this.nap.abort();
  }

  private heard(lanes: Lane[]): void {
    this.generation++;
    for (const lane of lanes) {
      const [queue, kind] = lane;
      if (this.kinds.includes(kind) && (this.options.queues?.includes(queue) ?? true)) this.add(lane);
    }
    if (lanes.length > 0) this.onFound();
    else this.pollNow();
  }

  private add(lane: Lane): void {
    const key = keyOf(lane);
    this.full.set(key, lane);
    this.known.set(key, lane);
  }

  private async run(signal: AbortSignal): Promise<void> {
    while (!signal.aborted) {
      // Made before the poll: a call to look again that comes while it is on the wire must not be lost.
      this.nap = new AbortController();
      const waitMs = await this.poll();
      if (waitMs > 0) await sleep(waitMs, this.nap.signal); // `stop` ends the nap too.
    }
  }

  /** @returns how long to wait before the next poll, ms */
  private async poll(): Promise<number> {
    try {
      const generation = ++this.generation;
      const startedAt = monotonicMs();
      const look = startedAt >= this.lookAfter;
      const [row] = await this.database.query<{
        promoted: number;
        lanes: Lane[] | null;
        suspects: Lane[] | null;
        next_due_ms: string | null;
      }>(pollSql(this.database.schema.quoted), [this.kinds, this.options.queues, PROMOTE_LIMIT, look], {
        name: 'leasehold_poll',
      });
      if (look) {
        this.lookAfter = monotonicMs() + (monotonicMs() - startedAt) / LOOK_SHARE - this.options.pollMs;
        // What was heard while it was on the wire is newer.
        if (generation === this.generation) this.full.clear();
        for (const lane of row?.lanes ?? []) this.add(lane);
        this.suspects = new Map((row?.suspects ?? []).map((lane) => [keyOf(lane), lane]));
      } else {
        // Not looked: a claim from where the last one ended costs next to nothing.
        for (const lane of this.known.values()) this.add(lane);
      }
      this.onFound();
      if (row?.promoted === PROMOTE_LIMIT) return 0;
      const { pollMs } = this.options;
      const nextMs = row?.next_due_ms == null ? pollMs : Number(row.next_due_ms);
      // Due and not promoted: somebody else has the row locked, and asking at once would be a busy loop.
      return nextMs <= 0 ? pollMs : Math.min(pollMs, nextMs);
    } catch (error) {
      this.trouble.warn('poll', `Poll failed: ${errorText(error)}`);
      return this.options.pollMs;
    }
  }
}

const keyOf = ([queue, kind]: Lane): string => JSON.stringify([queue, kind]);
