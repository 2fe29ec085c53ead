import type { Attested } from '../claim/held-leases';
import { startupOptions, SESSION_SETTINGS } from '../storage/connection';
import { monotonicMs } from '../storage/delays';
import { Session } from '../storage/session';
import { Schema } from '../storage/schema';
import { errorText } from '../storage/sql-errors';
import { attestSql, beatSql, lockHeldSql, sessionLockSql, storeLockSql, tallySql } from './beat.sql';
import { type Tally, tallies } from './tally';
import { type AttestResult, type BeatConfig, BeatMemory, type FromBeat, type ToBeat } from './beat-messages';

const CHUNK = 500;
const TALLIED = 5000;
const TOKEN_MIN = '-9223372036854775808';
const TOKEN_MAX = '9223372036854775807';

/**
 * Renews the worker lease on a connection of its own and holds the session lock there. Runs in a worker thread, so that neither a
 * blocked event loop nor an exhausted pool can starve it (R5); where the connection's settings cannot be cloned to a thread, in the
 * main one.
 */
export class BeatAgent {
  private readonly session: Session;
  private readonly memory: BeatMemory;
  private readonly s: string;
  private timer: NodeJS.Timeout | undefined;
  private no = 0;
  private beating = false;
  private clockSkewMs = 0;
  private stopped = false;

  constructor(
    private readonly config: BeatConfig,
    private readonly post: (message: FromBeat) => void,
  ) {
    const schema = new Schema(config.schema);
    this.s = schema.quoted;
    this.memory = new BeatMemory(config.memory);
    const settings = {
      ...SESSION_SETTINGS,
      statement_timeout: Math.floor(this.limitMs * 0.8),
      // A session that no beat uses any more is a ghost (frozen, cut off): it must not hold its locks for as long as TCP would.
      idle_session_timeout: config.ttlMs,
      // Lets the server notice soon that this process is gone while a statement of ours still runs.
      client_connection_check_interval: 1000,
    };
    this.session = new Session(
      () => ({
        ...config.connection,
        application_name: schema.sessionName(config.lockNo),
        options: startupOptions(
          { ...settings, application_name: schema.sessionName(config.lockNo) },
          config.connection.options,
        ),
      }),
      this.limitMs,
      {
        onUp: () => this.onUp(),
        onTrouble: (error) => this.post({ type: 'trouble', message: errorText(error) }),
      },
    );
  }

  /** A beat that takes longer than this will not help any more: better a new connection. */
  private get limitMs(): number {
    return Math.max(100, Math.min(this.config.queryTimeoutMs, this.config.beatMs));
  }

  start(): void {
    this.session.start();
    this.timer = setInterval(() => void this.beat(), this.config.beatMs);
  }

  receive(message: ToBeat): void {
    if (message.type === 'stop') void this.stop();
    else if (message.type === 'beat-now') void this.beat();
    else void this.attest(message.no, message.attested);
  }

  async stop(): Promise<void> {
    this.stopped = true;
    clearInterval(this.timer);
    await this.session.stop();
  }

  /** On every new connection: first the locks, then a beat at once, so that rescue sees either the old session or the new one. */
  private async onUp(): Promise<void> {
    const { lockSpace, lockNo, store, storeKey } = this.config;
    await this.session.query(`SELECT ${this.s}.advance_tokens_v1()`);
    await this.session.query(sessionLockSql, [lockSpace, lockNo]);
    const [lock] = await this.session.query<{ held: boolean }>(lockHeldSql, [lockSpace, lockNo]);
    if (!lock?.held) this.post({ type: 'pooled' });
    const [storeLock] = await this.session.query<{ got: boolean }>(storeLockSql[store], [storeKey]);
    if (!storeLock?.got) {
      this.post({ type: 'not-exclusive' });
      throw new Error('the store lock is held by another process');
    }
    await this.renew();
  }

  private async beat(): Promise<void> {
    if (this.beating || this.stopped || !this.session.up) return;
    this.beating = true;
    try {
      await this.renew();
    } catch (error) {
      this.post({ type: 'trouble', message: errorText(error) });
      this.session.drop();
    } finally {
      this.beating = false;
    }
  }

  private async renew(): Promise<void> {
    const { workerId, ttlMs, maxBlockedMs } = this.config;
    const blockedMs = Math.max(0, Math.round(monotonicMs() - this.memory.loopAliveAt));
    if (blockedMs > maxBlockedMs) return;
    const sentAt = monotonicMs();
    const [row] = await this.session.query<{ state: 'live' | 'draining'; now_ms: number }>(beatSql(this.s), [
      workerId,
      ttlMs,
      this.memory.inFlight,
      this.memory.stuck,
      blockedMs,
      this.clockSkewMs,
      this.config.lockNo,
    ]);
    if (!row) {
      this.post({ type: 'dead' });
      return;
    }
    this.clockSkewMs = clampInt(wallClockMs() - row.now_ms);
    this.memory.lastGoodAt = sentAt;
    this.post({ type: 'beat', no: ++this.no, sentAt });
  }

  /**
   * Compares the list with the database's, in contiguous token ranges that together cover all tokens. Long ranges are tallied first, and
   * compared row by row only where the numbers differ.
   */
  private async attest(no: number, attested: Attested): Promise<void> {
    const result: AttestResult = { gone: [], stops: [], unknown: [] };
    const { length } = attested.jobs;
    try {
      for (let from = 0; from === 0 || from < length; from += TALLIED) {
        const end = Math.min(from + TALLIED, length);
        if (end - from > CHUNK && (await this.agrees(attested, from, end))) continue;
        for (let at = from; at === 0 || at < end; at += CHUNK) {
          await this.compare(attested, at, Math.min(at + CHUNK, end), result);
        }
      }
    } catch (error) {
      this.post({ type: 'trouble', message: `attestation: ${errorText(error)}` });
      return;
    }
    this.post({ type: 'attested', no, workerId: this.config.workerId, result });
  }

  private async agrees({ jobs, tokens }: Attested, at: number, end: number): Promise<boolean> {
    const [tally] = await this.session.query<Tally & Record<string, unknown>>(tallySql(this.s), [
      this.config.workerId,
      ...rangeOf(tokens, at, end),
    ]);
    return tally !== undefined && tallies(jobs.slice(at, end), tokens.slice(at, end), tally);
  }

  private async compare(
    { jobs, tokens, below }: Attested,
    at: number,
    end: number,
    result: AttestResult,
  ): Promise<void> {
    const [row] = await this.session.query<{ [K in keyof AttestResult]: AttestResult[K] | null }>(attestSql(this.s), [
      this.config.workerId,
      jobs.slice(at, end),
      tokens.slice(at, end),
      ...rangeOf(tokens, at, end),
      below,
    ]);
    result.gone.push(...(row?.gone ?? []));
    result.stops.push(...(row?.stops ?? []));
    result.unknown.push(...(row?.unknown ?? []));
  }
}

/** The tokens from one chunk's first to the next one's, without end on either side. */
const rangeOf = (tokens: readonly string[], at: number, end: number): [string, string] => [
  at === 0 ? TOKEN_MIN : (tokens[at] ?? TOKEN_MAX),
  tokens[end] ?? TOKEN_MAX,
];

const clampInt = (ms: number): number => Math.max(-2_147_483_648, Math.min(2_147_483_647, Math.round(ms)));

/** The wall clock, only to report how far it is off; nothing is decided by it (law 3). */
const wallClockMs = (): number => performance.timeOrigin + performance.now();
