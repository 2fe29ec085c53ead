import { Injectable } from '@nestjs/common';
import { InvalidOptionError, NotRunningError } from '../errors';
import { HandlerRegistry } from '../handlers/handler-registry';
import { RESCUE_TEXT } from '../rescue/rescue.service';
import { Database } from '../storage/database';
import { WorkersService } from '../workers/workers.service';
import { Exchange } from './exchange';
import { type HeldLease, HeldLeases, type LeaseWatcher } from './held-leases';
import type { LeasedJob } from './leased-job';
import { pollSql } from './poll.sql';
import type { Lane } from './wake-up';

export interface ClaimOptions {
  /** Kinds to claim. */
  kinds: string[];
  /** Queues to claim from; default all. */
  queues?: string[];
  /** At most this many jobs, 1 to 1000. */
  limit: number;
}

/** A job claimed by hand: the leased job (with its token) and a signal that aborts when the lease is lost or the job is to stop. */
export interface ClaimedJob {
  readonly job: LeasedJob;
  readonly signal: AbortSignal;
}

/** As many as a worker's poll: what is due and more urgent must be there before the claim chooses. */
const PROMOTED = 500;

/**
 * Claims jobs by hand, for code that steers itself: `claim`, do the work, then settle with SettleService. Of any number of rivals
 * exactly one gets a job (R1). Needs a registered worker (`WorkersService.register`, `HeartbeatService.start`); its beats renew these
 * leases and compare them with the database like all others. At its deadline the signal aborts and the lease is given up.
 */
@Injectable()
export class ClaimService implements LeaseWatcher {
  constructor(
    private readonly exchange: Exchange,
    private readonly held: HeldLeases,
    private readonly workers: WorkersService,
    private readonly database: Database,
    private readonly registry: HandlerRegistry,
  ) {}

  /**
   * @returns at most `limit` jobs, highest priority first, then oldest; an empty list when there is none. A job that must run alone (its
   *   next crash would spend its budget) comes alone, to a worker that holds nothing else.
   * @throws NotRunningError when this process is not registered, or the database holds it for dead
   */
  async claim({ kinds, queues, limit }: ClaimOptions): Promise<ClaimedJob[]> {
    if (!Number.isInteger(limit) || limit < 1 || limit > 1000) {
      throw new InvalidOptionError(`limit = ${limit} is not allowed: it must be a whole number from 1 to 1000`);
    }
    const workerId = this.workers.currentId;
    const [row] = await this.database.query<{ lanes: Lane[] | null; suspects: Lane[] | null }>(
      pollSql(this.database.schema.quoted),
      [kinds, queues ?? null, PROMOTED, true],
    );
    const lanes = [
      ...new Map(
        [...(row?.lanes ?? []), ...(row?.suspects ?? [])].map((lane) => [JSON.stringify(lane), lane]),
      ).values(),
    ];
    if (lanes.length === 0) return [];
    const reply = await this.exchange.claim({
      workerId,
      want: limit,
      lanes,
      limits: lanes.map(() => limit),
      fleet: lanes.map(([, kind]) => this.registry.get(kind)?.fleetConcurrency ?? null),
      suspects: this.held.size === 0 ? 1 : 0,
    });
    if (!reply.ok) {
      throw new NotRunningError(
        reply.refused
          ? `The database does not hold worker ${workerId} for live: its lease has expired, or it was declared dead`
          : 'The reply to the claim was lost; what it may have leased is given back by the next beat',
      );
    }
    const held = reply.leases;
    if (workerId !== this.workers.current?.id) {
      for (const { job } of held) void this.exchange.settle(job, { event: 'giveback' });
      throw new NotRunningError(`Worker ${workerId} was lost while it claimed; what it got was given back`);
    }
    for (const lease of held) lease.watch(this);
    return held.map(({ job, signal }) => ({ job, signal }));
  }

  /** The worker's own end of way 3, for what was claimed by hand. */
  deadlinePassed(lease: HeldLease): void {
    if (lease.settling) return;
    lease.interrupt('deadline');
    void this.exchange.settle(lease.job, { event: 'deadline', reason: RESCUE_TEXT.deadline });
  }
}
