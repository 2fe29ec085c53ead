import type { Attested } from '../claim/held-leases';
import { startupOptions, SESSION_SETTINGS } from '../storage/connection';
import { monotonicMs } from '../storage/delays';
import { Session } from '../storage/session';
import { Schema } from '../storage/schema';
import { errorText } from '../storage/sql-errors';
import { attestSql, beatSql, lockHeldSql, sessionLockSql, storeLockSql } from './beat.sql';
import { type AttestResult, type BeatConfig, BeatMemory, type FromBeat, type ToBeat } from './beat-messages';

const CHUNK = 500;
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

  /** Compares the list with the database's, in chunks of contiguous token ranges that together cover all tokens. */
  private async attest(no: number, attested: Attested): Promise<void> {
    const result: AttestResult = { gone: [], stops: [], unknown: [] };
    const { jobs, tokens, below } = attested;
    try {
      for (let at = 0; at === 0 || at < jobs.length; at += CHUNK) {
        const end = at + CHUNK;
        const [row] = await this.session.query<{ [K in keyof AttestResult]: AttestResult[K] | null }>(
          attestSql(this.s),
          [
            this.config.workerId,
            jobs.slice(at, end),
            tokens.slice(at, end),
            at === 0 ? TOKEN_MIN : tokens[at],
            tokens[end] ?? TOKEN_MAX,
            below,
          ],
        );
        result.gone.push(...(row?.gone ?? []));
        result.stops.push(...(row?.stops ?? []));
        result.unknown.push(...(row?.unknown ?? []));
      }
    } catch (error) {
      this.post({ type: 'trouble', message: `attestation: ${errorText(error)}` });
      return;
    }
    this.post({ type: 'attested', no, workerId: this.config.workerId, result });
  }
}

const clampInt = (ms: number): number => Math.max(-2_147_483_648, Math.min(2_147_483_647, Math.round(ms)));

/** The wall clock, only to report how far it is off; nothing is decided by it (law 3). */
const wallClockMs = (): number => performance.timeOrigin + performance.now();
