import { Injectable, Logger } from '@nestjs/common';
import { Exchange } from '../claim/exchange';
import { moveSql } from '../claim/exchange.sql';
import { HeldLeases } from '../claim/held-leases';
import { WakeUp } from '../claim/wake-up';
import { NotRunningError, SchemaError, StoreNotExclusiveError } from '../errors';
import { ThrottledLog } from '../events/throttled-log';
import { ResolvedOptions } from '../options/lease-options';
import type { MoveRow } from '../settle/outcome';
import { Database } from '../storage/database';
import { monotonicMs } from '../storage/delays';
import { errorText } from '../storage/sql-errors';
import type { WorkerIdentity } from '../workers/workers.service';
import { type AttestResult, BeatMemory, type FromBeat } from './beat-messages';
import { type BeatRunner, startBeat } from './beat-runner';

interface Waiter<T> {
  resolve: (value: T) => void;
  reject: (error: Error) => void;
}

/** Share of the TTL that is left to end the work before others may take it. */
const MARGIN = 0.1;

/**
 * Keeps this worker's lease alive, and tells its jobs when it no longer is. The beat itself runs in a thread (see BeatAgent); this
 * side answers it with the list of leases held, interrupts what was lost or is to stop, and fences the whole process when no beat
 * has succeeded for a TTL less a margin, counted from sending the last good one (R7, F:B6).
 */
@Injectable()
export class HeartbeatService {
  private readonly logger = new Logger('Leasehold');
  private readonly trouble = new ThrottledLog(this.logger);
  private readonly memory = new BeatMemory();
  private runner: BeatRunner | undefined;
  private watch: NodeJS.Timeout | undefined;
  private identity: WorkerIdentity | undefined;
  private steadySince = 0;
  private lastSentAt = 0;
  private ready: { resolve(): void; reject(error: Error): void } | undefined;
  private fence: ((why: string) => void) | undefined;
  private readonly attestWaiters = new Set<Waiter<AttestResult>>();
  private readonly beatWaiters = new Set<Waiter<void>>();

  constructor(
    private readonly options: ResolvedOptions,
    private readonly database: Database,
    private readonly held: HeldLeases,
    private readonly exchange: Exchange,
    wakeUp: WakeUp,
  ) {
    wakeUp.onStops((stops) => {
      this.stopLeases(stops);
      // The list was too long to be sent: the next beat has it, and that is now.
      if (stops.length === 0 && this.held.size > 0) this.runner?.post({ type: 'beat-now' });
    });
  }

  /** Milliseconds for which the beats of this process have succeeded without a gap; 0 if the last one is overdue. */
  get steadyMs(): number {
    const now = monotonicMs();
    return this.steadySince === 0 || now - this.memory.lastGoodAt > this.options.lease.beatMs * 2
      ? 0
      : now - this.steadySince;
  }

  /** Milliseconds since the last successful beat was sent. */
  get silentMs(): number {
    return monotonicMs() - this.memory.lastGoodAt;
  }

  /** Whether this worker may still believe in its leases: its own clock says that others cannot have taken them yet. */
  get trusted(): boolean {
    return this.identity !== undefined && this.silentMs < this.options.lease.ttlMs * (1 - MARGIN);
  }

  /** Handlers that ignore their abort; published with every beat. */
  set stuck(count: number) {
    this.memory.stuck = count;
  }

  /**
   * Starts the beats of a registered worker. Resolves after the first one, with the session lock held.
   * @param fence called once when this identity is lost; its leases have been interrupted by then
   * @throws StoreNotExclusiveError, SchemaError behind a transaction-mode pooler without `connection.directUrl`
   */
  async start(identity: WorkerIdentity, fence: (why: string) => void): Promise<void> {
    const { lease, connection, store } = this.options;
    const { schema, targets } = this.database;
    this.identity = identity;
    this.fence = fence;
    this.steadySince = 0;
    this.memory.lastGoodAt = monotonicMs();
    this.memory.loopAliveAt = monotonicMs();
    const first = new Promise<void>((resolve, reject) => (this.ready = { resolve, reject }));
    const launch = (): void => {
      this.runner = startBeat(
        {
          workerId: identity.id,
          connection: targets.direct,
          schema: schema.name,
          lockSpace: schema.lockSpace,
          lockNo: identity.lockNo,
          storeKey: schema.lockKey('store'),
          store,
          ttlMs: lease.ttlMs,
          beatMs: lease.beatMs,
          maxBlockedMs: lease.maxBlockedMs,
          queryTimeoutMs: connection.queryTimeoutMs,
          memory: this.memory.buffer,
        },
        (message) => this.receive(identity, message),
        (why) => {
          this.trouble.warn('beat', `${why}; starting another`);
          setTimeout(() => this.identity === identity && launch(), 100).unref();
        },
      );
    };
    launch();
    if (this.runner && !this.runner.threaded) {
      this.logger.warn(
        "The connection's settings hold functions and cannot go to the beat's thread: beats run in the main thread, and a handler " +
          'that blocks the event loop for longer than lease.ttl loses its leases',
      );
    }
    this.watch = setInterval(() => this.look(), Math.max(20, Math.min(250, lease.beatMs / 4)));
    try {
      await first;
    } catch (error) {
      if (this.identity === identity) await this.stop();
      throw error;
    }
  }

  /** Ends the beats and frees the session lock; a `start` that still waits for its first beat is refused. Idempotent. */
  async stop(): Promise<void> {
    this.identity = undefined;
    this.failStart(new NotRunningError('the beats were stopped before the first one'));
    this.failWaiters('the beats were stopped');
    clearInterval(this.watch);
    const runner = this.runner;
    this.runner = undefined;
    await runner?.stop();
  }

  /** Lets the process end although beats still go on: for a drain whose handlers ignore the abort. */
  unref(): void {
    this.watch?.unref();
  }

  /**
   * Renews now, out of turn, and compares what this process holds with the database.
   * @returns what was found: leases gone, stop requests, leases that nobody here knew (they were given back)
   * @throws NotRunningError without beats, or when none succeeds within a TTL
   */
  async renew(): Promise<AttestResult> {
    return this.awaited(this.attestWaiters, () => this.runner?.post({ type: 'beat-now' }));
  }

  /** Resolves after the next successful beat. @throws NotRunningError without beats, or when none succeeds within a TTL */
  async nextBeat(): Promise<void> {
    return this.awaited(this.beatWaiters);
  }

  private async awaited<T>(waiters: Set<Waiter<T>>, begin: () => void = () => undefined): Promise<T> {
    if (!this.identity)
      throw new NotRunningError(
        'No beats are running: call WorkersService.register() and HeartbeatService.start() first',
      );
    let timer: NodeJS.Timeout | undefined;
    let waiter: Waiter<T> | undefined;
    try {
      return await new Promise<T>((resolve, reject) => {
        waiter = { resolve, reject };
        waiters.add(waiter);
        timer = setTimeout(
          () => reject(new NotRunningError('No beat has succeeded for a TTL')),
          this.options.lease.ttlMs,
        );
        begin();
      });
    } finally {
      clearTimeout(timer);
      if (waiter) waiters.delete(waiter);
    }
  }

  private failWaiters(why: string): void {
    for (const { reject } of [...this.attestWaiters, ...this.beatWaiters]) reject(new NotRunningError(why));
  }

  private look(): void {
    this.memory.loopAliveAt = monotonicMs();
    this.memory.inFlight = this.held.size;
    if (!this.trusted && this.identity && this.ready === undefined) {
      this.lose(`no beat reached the database for ${Math.round(this.silentMs)} ms`);
    }
  }

  private receive(identity: WorkerIdentity, message: FromBeat): void {
    if (this.identity !== identity) return;
    switch (message.type) {
      case 'beat':
        return this.onBeat(identity, message);
      case 'attested':
        return this.onAttested(message.result, identity);
      case 'dead':
        return this.lose('it was declared dead');
      case 'not-exclusive':
        return this.onNotExclusive();
      case 'pooled':
        return this.failStart(
          new SchemaError(
            'Session locks do not hold on this connection, which looks like a transaction-mode pooler: set connection.directUrl to a ' +
              'URL that goes straight to PostgreSQL',
          ),
        );
      case 'trouble':
        this.trouble.warn('beat', `Beat of ${identity.id}: ${message.message}`);
    }
  }

  private onBeat(identity: WorkerIdentity, { no, sentAt }: FromBeat & { type: 'beat' }): void {
    // By when they were sent: while this thread is blocked the beats go on, and their messages wait.
    if (this.steadySince === 0 || sentAt - this.lastSentAt > this.options.lease.beatMs * 2) this.steadySince = sentAt;
    this.lastSentAt = sentAt;
    this.ready?.resolve();
    this.ready = undefined;
    for (const { resolve } of this.beatWaiters) resolve();
    this.runner?.post({ type: 'held', no, attested: this.held.attested(identity.id) });
  }

  private onAttested(result: AttestResult, identity: WorkerIdentity): void {
    for (const [jobId, token] of result.gone) this.held.get(`${jobId}:${token}`)?.gone();
    this.stopLeases(result.stops);
    const unknown = result.unknown.filter(([jobId, token]) => !this.held.get(`${jobId}:${token}`));
    if (unknown.length > 0) void this.giveBack(unknown, identity);
    for (const { resolve } of this.attestWaiters) resolve(result);
  }

  private stopLeases(stops: AttestResult['stops']): void {
    for (const [jobId, token, request] of stops) {
      this.held.get(`${jobId}:${token}`)?.interrupt(request === 'cancel' ? 'cancelled' : 'paused');
    }
  }

  /** Leases of a claim whose reply was lost: nobody runs them, so they go back at once instead of waiting for their deadline. */
  private async giveBack(unknown: AttestResult['unknown'], identity: WorkerIdentity): Promise<void> {
    const moves = unknown.map(([job, token]) => ({ job, token, worker: identity.id, event: 'giveback' }));
    try {
      const rows = await this.database.query<MoveRow>(moveSql(this.database.schema.quoted), [JSON.stringify(moves)]);
      this.exchange.movedElsewhere(rows);
      this.logger.warn(`Gave back ${unknown.length} jobs whose claim's reply was lost`);
      this.exchange.wake();
    } catch (error) {
      this.trouble.warn(
        'unknown',
        `Could not give back ${unknown.length} unknown leases, the next beat tries again: ${errorText(error)}`,
      );
    }
  }

  private onNotExclusive(): void {
    const error = new StoreNotExclusiveError(
      this.options.store === 'exclusive'
        ? "store = 'exclusive', and another worker of this schema is up: stop it first, or use store: 'shared'"
        : "A worker with store = 'exclusive' is up on this schema: stop it first",
    );
    if (this.ready) this.failStart(error);
    else this.trouble.warn('store', error.message);
  }

  private failStart(error: Error): void {
    this.ready?.reject(error);
    this.ready = undefined;
  }

  private lose(why: string): void {
    const { identity, fence } = this;
    if (!identity) return;
    // Before its first beat it holds nothing: the start has failed, and whoever called it decides.
    if (this.ready)
      return this.failStart(new NotRunningError(`Worker ${identity.id} was lost before its first beat: ${why}`));
    this.identity = undefined;
    this.failWaiters(why);
    for (const lease of this.held.all()) if (lease.job.workerId === identity.id) lease.interrupt('lease-lost', why);
    fence?.(why);
  }
}
