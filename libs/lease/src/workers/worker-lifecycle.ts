import { Injectable, Logger } from '@nestjs/common';
import { BatchFollowUps } from '../batches/batch-follow-ups';
import { Dispatcher } from '../claim/dispatcher';
import { Exchange } from '../claim/exchange';
import { HeldLeases } from '../claim/held-leases';
import { NotRunningError, StoreNotExclusiveError } from '../errors';
import { LeaseEvents } from '../events/lease-events';
import { ThrottledLog } from '../events/throttled-log';
import { HeartbeatService } from '../heartbeat/heartbeat.service';
import { LeaderService } from '../leader/leader.service';
import { ResolvedOptions } from '../options/lease-options';
import { RescueLoop } from '../rescue/rescue-loop';
import { RescueService } from '../rescue/rescue.service';
import { Database } from '../storage/database';
import { backoffMs, sleep, within } from '../storage/delays';
import { MainSession } from '../storage/main-session';
import { errorText } from '../storage/sql-errors';
import { HandlerRegistry } from '../handlers/handler-registry';
import { WorkersService } from './workers.service';

/** How often a drain looks whether leases that were claimed by hand are settled. */
const BUSY_LOOK_MS = 50;

type State = 'idle' | 'starting' | 'running' | 'draining' | 'drained';

/** The parts that a worker process has beyond its registration, started and stopped together. */
@Injectable()
export class WorkerParts {
  constructor(
    readonly session: MainSession,
    readonly leader: LeaderService,
    readonly rescueLoop: RescueLoop,
    readonly rescue: RescueService,
    readonly registry: HandlerRegistry,
    readonly followUps: BatchFollowUps,
  ) {}
}

/**
 * The life of a worker process: register and beat; claim and run; on a fence, abort and register anew; on shutdown, drain. Every step may be
 * called twice.
 */
@Injectable()
export class WorkerLifecycle {
  private readonly logger = new Logger('Leasehold');
  private readonly trouble = new ThrottledLog(this.logger);
  private state: State = 'idle';
  private starting: Promise<void> | undefined;
  private draining: Promise<void> | undefined;
  private closing = false;
  private readonly fenced = new Set<string>();
  private comingBack: Promise<void> | undefined;
  private readonly ending = new AbortController();

  constructor(
    private readonly parts: WorkerParts,
    private readonly workers: WorkersService,
    private readonly heartbeat: HeartbeatService,
    private readonly dispatcher: Dispatcher,
    private readonly exchange: Exchange,
    private readonly held: HeldLeases,
    private readonly database: Database,
    private readonly options: ResolvedOptions,
    private readonly events: LeaseEvents,
  ) {}

  /**
   * Registers, proves an exclusive store, and begins to claim. Called when the whole application has started. Further calls wait for the
   * first, unless that failed.
   * @throws NotRunningError after `drain()`: what is shut down is not started again
   */
  start(): Promise<void> {
    if (this.draining)
      return Promise.reject(new NotRunningError('The lease module is shut down; start a new application'));
    this.starting ??= this.startOnce().catch((error: unknown) => {
      this.starting = undefined;
      throw error;
    });
    return this.starting;
  }

  private async startOnce(): Promise<void> {
    if (this.options.role === 'producer') return;
    this.state = 'starting';
    const { session, leader, rescueLoop, rescue } = this.parts;
    try {
      await this.enlist();
      if (this.options.store === 'exclusive') {
        const moved = await rescue.rescueAll();
        if (moved > 0) this.logger.log(`Exclusive store: re-queued ${moved} jobs of earlier processes`);
      }
    } catch (error) {
      await this.heartbeat.stop();
      await this.removeRegistration();
      this.state = 'idle';
      throw error;
    }
    this.state = 'running';
    session.start();
    leader.start();
    rescueLoop.start();
    // Lost again between its first beat and here: then it comes back first.
    if (this.fenced.size > 0) this.comingBack ??= this.comeBack().finally(() => (this.comingBack = undefined));
    else this.open();
  }

  /**
   * Stops claiming, gives back what has not started, lets handlers finish for `shutdown.timeout`, then aborts them with reason
   * 'drain'. Handlers that ignore that for `shutdown.grace` keep their leases, and the beats go on for as long as the process lives, so
   * that nothing runs twice meanwhile. Idempotent: further calls wait for the first.
   */
  drain(): Promise<void> {
    this.draining ??= this.drainOnce();
    return this.draining;
  }

  private async drainOnce(): Promise<void> {
    await this.endStart();
    const began = this.state;
    this.state = 'draining';
    this.ending.abort();
    await this.endComingBack();
    const id = this.workers.current?.id;
    // A producer that was registered by hand has something to sign off too.
    if (began !== 'running' && id === undefined) {
      this.exchange.stop();
      await this.parts.session.stop();
      this.state = 'drained';
      return;
    }
    const { timeoutMs, graceMs } = this.options.shutdown;
    this.dispatcher.close();
    if (id !== undefined) await this.quietly('announce the drain', () => this.workers.drain(id));
    await this.dispatcher.stop();
    if (!(await within(timeoutMs, this.allEnded()))) {
      for (const lease of this.held.all()) lease.interrupt('drain');
      await within(graceMs, this.allEnded());
    }
    await within(this.options.connection.queryTimeoutMs, this.exchange.idle());
    const { session, leader, rescueLoop } = this.parts;
    await rescueLoop.stop();
    await leader.stop();
    await session.stop();
    if (!this.isBusy) return this.signOff(id);
    this.logger.warn(
      `${Math.max(this.dispatcher.runningCount, this.held.size)} jobs ignore the abort: their leases stay while they run, and are rescued if this process ends before`,
    );
    this.heartbeat.unref();
    void this.allEnded().then(() => this.signOff(id));
  }

  /** Handlers that run, and leases (also those claimed by hand) without an answered outcome, for as long as beats keep them. */
  private get isBusy(): boolean {
    return this.dispatcher.runningCount > 0 || (this.held.size > 0 && this.heartbeat.trusted);
  }

  private async allEnded(): Promise<void> {
    await this.dispatcher.allEnded();
    await this.exchange.idle();
    while (this.isBusy) await unrefSleep(BUSY_LOOK_MS);
  }

  /** A start on its way is let to its end, which is near; one that waits for an absent database is given up. */
  private async endStart(): Promise<void> {
    const { starting } = this;
    if (!starting) return;
    const ended = starting.catch(() => undefined);
    if (!(await within(this.options.connection.queryTimeoutMs, ended))) await this.heartbeat.stop();
    await ended;
  }

  /** A registration on its way is let to its end, and signed off like any; one that waits for an absent database is given up. */
  private async endComingBack(): Promise<void> {
    const { comingBack } = this;
    if (!comingBack) return;
    while (!(await within(this.options.connection.queryTimeoutMs, comingBack))) await this.heartbeat.stop();
  }

  private async signOff(id: string | undefined): Promise<void> {
    this.exchange.stop();
    await this.endFollowUps();
    if (id !== undefined && (await this.quietly('sign off', () => this.workers.stopped(id))) === false) {
      this.logger.warn(`Worker ${id} still holds leases, or was declared dead; its leases are rescued`);
    }
    await this.heartbeat.stop();
    this.workers.leave();
    this.state = 'drained';
    if (this.closing) await this.database.close();
  }

  /**
   * Closes the last connections; other modules' hooks could enqueue up to their `beforeApplicationShutdown`. With handlers still running,
   * the connections stay until these end.
   */
  async close(): Promise<void> {
    await this.drain();
    this.closing = true;
    if (this.state === 'drained') await this.endFollowUps();
    this.events.close();
    if (this.state === 'drained') await this.database.close();
  }

  /** What ended last is followed up, unless the database is away: the leader's sweep will find it. */
  private async endFollowUps(): Promise<void> {
    const { followUps } = this.parts;
    await within(this.options.connection.queryTimeoutMs, followUps.idle());
    if (this.closing) followUps.stop();
  }

  private async enlist(): Promise<void> {
    const identity = await this.workers.register(this.parts.registry.kinds);
    await this.heartbeat.start(identity, (why) => this.onFenced(identity.id, why));
  }

  private open(): void {
    const { registry } = this.parts;
    const definitions = registry.kinds.flatMap((kind) => registry.get(kind) ?? []);
    this.dispatcher.open(this.workers.currentId, definitions, () => void this.heartbeat.renew().catch(() => undefined));
  }

  /** This identity is lost; its jobs have been interrupted. One way back at a time, however often it happens on the way. */
  private onFenced(id: string, why: string): void {
    this.dispatcher.close();
    this.events.emit({ type: 'worker.fenced', workerId: id, message: why });
    this.fenced.add(id);
    this.comingBack ??= this.comeBack().finally(() => (this.comingBack = undefined));
  }

  /**
   * What the lost identities still hold in the database goes back uncharged, and the process comes back under a new id as soon as the database
   * answers.
   */
  private async comeBack(): Promise<void> {
    for (let tries = 0; this.state === 'running' && this.fenced.size > 0; tries++) {
      const ids = [...this.fenced];
      try {
        await this.heartbeat.stop();
        this.workers.leave();
        for (const id of ids) await this.workers.retire(id);
        await this.parts.rescue.rescueOrphans();
        await this.enlist();
        for (const id of ids) this.fenced.delete(id);
        // In the same turn as the look at `fenced`: a loss after this begins anew.
        if (this.state === 'running' && this.fenced.size === 0) this.open();
      } catch (error) {
        this.trouble.warn('enlist', `Cannot register again yet: ${errorText(error)}`);
        await this.removeRegistration();
        await sleep(backoffMs(tries, 100, 5000), this.ending.signal);
      }
    }
  }

  private async removeRegistration(): Promise<void> {
    const id = this.workers.current?.id;
    this.workers.leave();
    if (id !== undefined) await this.quietly('withdraw the registration', () => this.workers.stopped(id));
  }

  private async quietly<T>(what: string, work: () => Promise<T>): Promise<T | undefined> {
    try {
      return await work();
    } catch (error) {
      if (error instanceof StoreNotExclusiveError) throw error;
      this.trouble.warn(what, `Could not ${what}: ${errorText(error)}`);
      return undefined;
    }
  }
}

const unrefSleep = (ms: number): Promise<void> => new Promise((resolve) => setTimeout(resolve, ms).unref());
