import { Injectable, Logger } from '@nestjs/common';
import { ThrottledLog } from '../events/throttled-log';
import { ResolvedOptions } from '../options/lease-options';
import { Database } from '../storage/database';
import { monotonicMs, sleep } from '../storage/delays';
import { errorText, isLimit } from '../storage/sql-errors';
import { pollSql } from './poll.sql';
import { type Lane, WakeUp } from './wake-up';

const PROMOTE_LIMIT = 500;
/** Looking for lanes may take this part of the time: dead rows that an old snapshot keeps can make it dear. */
const LOOK_SHARE = 1 / 20;
const LONGEST_REST_MS = 60_000;

/**
 * Which lanes (queue, kind) hold something for this worker. Learnt from a poll, once a second and whenever the next scheduled job is due,
 * and sooner from wake-ups. A lane that a claim found empty is left alone until either says otherwise; `heardOf` tells whether
 * one did while that claim was on the wire.
 */
@Injectable()
export class Lanes {
  private readonly trouble = new ThrottledLog(new Logger('Leasehold'));
  private full = new Map<string, Lane>();
  private suspects = new Map<string, Lane>();
  /** Every lane that the last look listed, or that was heard of since; with the number of what was heard last. */
  private readonly known = new Map<string, { lane: Lane; heard: number }>();
  private hinted = 0;
  private lookAfter = 0;
  private kinds: string[] = [];
  private stopping = new AbortController();
  private nap = new AbortController();
  private running: Promise<void> | undefined;
  private onFound: () => void = () => undefined;
  /** Grows with everything that is heard of this worker's lanes. */
  heardOf = 0;

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

  /**
   * A claim found these empty that was sent at `heardOf`: nothing more is there, unless something was heard of them since. `suspects` as
   * it asked for them: 2 = only those were looked for. `found`: it brought something, so more suspects may be there.
   */
  empty(lanes: readonly Lane[], heardOf: number, suspects: 0 | 1 | 2, found: boolean): void {
    for (const lane of lanes) {
      const key = keyOf(lane);
      if (Math.max(this.hinted, this.known.get(key)?.heard ?? 0) > heardOf) continue;
      if (suspects < 2) this.full.delete(key);
      if (suspects > 0 && !found) this.suspects.delete(key);
    }
  }

  /** Looks again at once. */
  pollNow(): void {
    this.nap.abort();
  }

  private heard(lanes: Lane[]): void {
    const ours = lanes.filter(
      ([queue, kind]) => this.kinds.includes(kind) && (this.options.queues?.includes(queue) ?? true),
    );
    for (const lane of ours) this.add(lane);
    if (ours.length > 0) this.onFound();
    if (lanes.length > 0) return;
    this.hinted = ++this.heardOf;
    this.pollNow();
  }

  private add(lane: Lane): void {
    const key = keyOf(lane);
    this.full.set(key, lane);
    this.known.set(key, { lane, heard: ++this.heardOf });
  }

  private async run(signal: AbortSignal): Promise<void> {
    while (!signal.aborted) {
      // Made before the poll: a call to look again that comes while it is on the wire must not be lost.
      this.nap = new AbortController();
      const waitMs = await this.poll();
      if (waitMs > 0) await sleep(waitMs, this.nap.signal); // `stop` ends the nap too.
    }
  }

  private forget(key: string): void {
    this.full.delete(key);
    this.known.delete(key);
  }

  private restFor(lookMs: number): void {
    this.lookAfter = monotonicMs() + Math.min(LONGEST_REST_MS, lookMs / LOOK_SHARE) - this.options.pollMs;
  }

  /** @returns how long to wait before the next poll, ms */
  private async poll(): Promise<number> {
    const startedAt = monotonicMs();
    const look = startedAt >= this.lookAfter;
    try {
      const { heardOf } = this;
      const [row] = await this.database.query<{
        promoted: number;
        lanes: Lane[] | null;
        suspects: Lane[] | null;
        next_due_ms: string | null;
        look_us: string | null;
      }>(pollSql(this.database.schema.quoted), [this.kinds, this.options.queues, PROMOTE_LIMIT, look], {
        name: 'leasehold_poll',
      });
      if (look) {
        this.restFor(Number(row?.look_us ?? 0) / 1000);
        // What was heard while it was on the wire is newer.
        for (const [key, { heard }] of this.known) if (heard <= heardOf) this.forget(key);
        for (const lane of row?.lanes ?? []) this.add(lane);
        this.suspects = new Map((row?.suspects ?? []).map((lane) => [keyOf(lane), lane]));
      } else {
        // Not looked: a claim from where the last one ended costs next to nothing.
        for (const { lane } of this.known.values()) this.add(lane);
      }
      this.onFound();
      if (row?.promoted === PROMOTE_LIMIT) return 0;
      const { pollMs } = this.options;
      const nextMs = row?.next_due_ms == null ? pollMs : Number(row.next_due_ms);
      // Due and not promoted: somebody else has the row locked, and asking at once would be a busy loop.
      return nextMs <= 0 ? pollMs : Math.min(pollMs, nextMs);
    } catch (error) {
      // A look that ran into the limit would take the promotion with it again.
      if (look && isLimit(error)) this.restFor(monotonicMs() - startedAt);
      this.trouble.warn('poll', `Poll failed: ${errorText(error)}`);
      return this.options.pollMs;
    }
  }
}

const keyOf = ([queue, kind]: Lane): string => JSON.stringify([queue, kind]);
