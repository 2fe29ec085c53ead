import { Injectable, Logger } from '@nestjs/common';
import { BatchFollowUps } from '../batches/batch-follow-ups';
import { LeaseEvents, type RescueCause, jobRef } from '../events/lease-events';
import { ThrottledLog } from '../events/throttled-log';
import { HeartbeatService } from '../heartbeat/heartbeat.service';
import { ResolvedOptions } from '../options/lease-options';
import type { Move, MoveRow } from '../settle/outcome';
import { Database } from '../storage/database';
import { monotonicMs } from '../storage/delays';
import { errorText, isContentError } from '../storage/sql-errors';
import { WorkersService } from '../workers/workers.service';
import {
  leasesOfSql,
  markAllSql,
  markExpiredSql,
  markVanishedSql,
  orphansSql,
  overdueSql,
  rescueSql,
  sessionsSql,
} from './rescue.sql';
import { type SessionLook, VanishedWorkers } from './vanished';

/** What stands in the closed run's error (R10). */
export const RESCUE_TEXT: Record<RescueCause, string> = {
  session: 'session lost: worker process presumed dead',
  lease: 'heartbeat stale: worker presumed dead',
  deadline: 'hard deadline exceeded',
  exclusive: 'session lost: worker process presumed dead',
};

/** A lease that was read and is to be taken; nothing is moved unless it is still the one that was read. */
export interface RescueCandidate {
  jobId: string;
  token: string;
  workerId: string;
  move: Pick<Move, 'event' | 'alone'>;
}

interface Marked {
  id: string;
  silent_ms: string;
}

interface Orphan {
  id: string;
  died_of: string | null;
  leases_at_death: number | null;
  drained: boolean | null;
  ended_at: string | null;
}

/**
 * Takes leases from workers that no longer deserve them, in three independent ways (DESIGN §5). Each may be called by hand, from
 * any process, also by two at once: every statement is guarded and skips what another has locked.
 */
@Injectable()
export class RescueService {
  private readonly trouble = new ThrottledLog(new Logger('Leasehold'));
  private readonly vanished: VanishedWorkers;

  constructor(
    private readonly database: Database,
    private readonly options: ResolvedOptions,
    private readonly heartbeat: HeartbeatService,
    private readonly workers: WorkersService,
    private readonly events: LeaseEvents,
    private readonly followUps: BatchFollowUps,
  ) {
    this.vanished = new VanishedWorkers(options.rescue.sessionGraceMs, options.lease.ttlMs);
  }

  /** Way 1, one look: declares workers dead whose session is gone, and takes their leases. @returns leases moved */
  async rescueVanished(): Promise<number> {
    const { lockSpace } = this.database.schema;
    const looks = await this.database.query<SessionLook & Record<string, unknown>>(sessionsSql(this.s), [
      this.ownId,
      lockSpace,
      this.database.schema.sessionName(0).slice(0, -1),
    ]);
    const { dead, resting } = this.vanished.judge(looks, monotonicMs());
    if (resting) this.trouble.warn('resting', 'Most sessions vanished at once: rescue by session rests for a TTL');
    let moved = 0;
    for (const look of dead) {
      const marked = await this.database.query<Marked & Record<string, unknown>>(markVanishedSql(this.s), [
        look.id,
        look.beat_at,
        look.lock_no,
      ]);
      this.announce(marked, 'session');
      if (marked.length > 0) moved += await this.rescueOrphans();
    }
    return moved;
  }

  /**
   * Way 2: declares workers dead whose lease has expired, and takes the leases of every worker that is not live. Does nothing until this
   * process has had a TTL of its own beats without a gap, unless `unguarded`: after a gap it was the database that was away, not the fleet.
   * @returns leases moved
   */
  async rescueExpired({ unguarded = false } = {}): Promise<number> {
    if (!unguarded && this.heartbeat.steadyMs < this.options.lease.ttlMs) return 0;
    this.announce(
      await this.database.query<Marked & Record<string, unknown>>(markExpiredSql(this.s), [this.ownId]),
      'lease',
    );
    return this.rescueOrphans();
  }

  /** Way 3: takes leases whose deadline has passed, whatever their worker says. @returns leases moved */
  async rescueOverdue(): Promise<number> {
    const { batch } = this.options.rescue;
    for (let moved = 0; ;) {
      const rows = await this.database.query<{ job_id: string; token: string; worker_id: string }>(overdueSql(this.s), [
        this.ownId,
        batch,
      ]);
      const now = await this.take(
        rows.map((row) => ({
          jobId: row.job_id,
          token: row.token,
          workerId: row.worker_id,
          move: { event: 'deadline' },
        })),
        'deadline',
      );
      moved += now;
      if (now < batch) return moved;
    }
  }

  /** Level-triggered: whatever an interrupted rescue left with a worker that is not live. @returns leases moved */
  async rescueOrphans(): Promise<number> {
    const orphans = await this.database.query<Orphan & Record<string, unknown>>(orphansSql(this.s), [this.ownId]);
    let moved = 0;
    for (const orphan of orphans) {
      // A worker without a row cannot have lost its session, so far as anyone can tell: that is way 2's.
      if (orphan.died_of === null && !this.options.rescue.lease) continue;
      for (let now = this.options.rescue.batch; now === this.options.rescue.batch; moved += now) {
        now = await this.take(await this.candidatesOf(orphan), causeOf(orphan.died_of));
      }
    }
    return moved;
  }

  /** Exclusive store (R14): nobody else can be up, so every lease of an earlier worker goes back at once. @returns leases moved */
  async rescueAll(): Promise<number> {
    this.announce(
      await this.database.query<Marked & Record<string, unknown>>(markAllSql(this.s), [this.ownId]),
      'exclusive',
    );
    return this.rescueOrphans();
  }

  /** The leases of a worker that is not live, as they would be taken: at most `rescue.batch`. */
  async candidates(workerId: string): Promise<RescueCandidate[]> {
    const orphans = await this.database.query<Orphan & Record<string, unknown>>(orphansSql(this.s), [this.ownId]);
    const orphan = orphans.find(({ id }) => id === workerId);
    return orphan ? this.candidatesOf(orphan) : [];
  }

  /**
   * Takes what was read, if it is still what was read (R11). A row that the database refuses is left, and told of, and keeps no other from
   * being rescued. @returns leases moved
   */
  async take(candidates: RescueCandidate[], cause: RescueCause): Promise<number> {
    const [only] = candidates;
    if (!only) return 0;
    try {
      return await this.takeAll(candidates, cause);
    } catch (error) {
      if (!isContentError(error)) throw error;
      if (candidates.length === 1) {
        this.trouble.warn(
          `row ${only.jobId}`,
          `Job ${only.jobId} cannot be rescued, the database refuses the move: ${errorText(error)}`,
        );
        return 0;
      }
      const half = Math.ceil(candidates.length / 2);
      return (await this.take(candidates.slice(0, half), cause)) + (await this.take(candidates.slice(half), cause));
    }
  }

  private async takeAll(candidates: RescueCandidate[], cause: RescueCause): Promise<number> {
    const reason = RESCUE_TEXT[cause];
    const rows = await this.database.query<MoveRow & Record<string, unknown>>(rescueSql(this.s), [
      JSON.stringify(
        candidates.map(({ jobId, token, workerId, move }) => ({
          job: jobId,
          token,
          worker: workerId,
          ...move,
          // One that was moved since it was read has not passed.
          ...(move.event === 'deadline' ? { overdue: true } : {}),
          reason,
        })),
      ),
    ]);
    for (const row of rows) {
      if (row.batch_id !== '0' && FINISHED.includes(row.place)) this.followUps.ended(row.batch_id, row.job_id);
      this.events.emit({
        type: 'job.rescued',
        cause,
        place: row.place,
        message: reason,
        jobId: row.job_id,
        kind: row.kind,
        queue: row.queue,
        workerId: row.worker_id,
        token: row.token,
        attempt: row.attempt,
      });
      if (row.place === 'failed') {
        const job = { ...row, id: row.job_id, workerId: row.worker_id };
        this.events.emit({ type: 'job.finally-failed', reason: row.reason ?? reason, ...jobRef(job) });
      }
    }
    return rows.length;
  }

  /** Runs one way; an outage costs a line in the log, never the loop. */
  async attempt(what: string, way: () => Promise<number>): Promise<number | undefined> {
    try {
      return await way();
    } catch (error) {
      this.trouble.warn(what, `Rescue (${what}) failed, the next pass finds the same: ${errorText(error)}`);
      return undefined;
    }
  }

  private async candidatesOf(orphan: Orphan): Promise<RescueCandidate[]> {
    const rows = await this.database.query<{ job_id: string; token: string; late: boolean }>(leasesOfSql(this.s), [
      orphan.id,
      orphan.ended_at,
      this.options.rescue.batch,
    ]);
    const alone = orphan.leases_at_death === null ? rows.length === 1 : orphan.leases_at_death === 1;
    return rows.map((row) => ({
      jobId: row.job_id,
      token: row.token,
      workerId: orphan.id,
      move:
        row.late || orphan.died_of === 'self'
          ? { event: 'return' }
          : orphan.drained
            ? { event: 'lostdrain' }
            : { event: 'crash', alone },
    }));
  }

  private announce(marked: Marked[], cause: RescueCause): void {
    for (const { id, silent_ms } of marked) {
      this.events.emit({ type: 'worker.died', workerId: id, cause, silentMs: Number(silent_ms) });
    }
  }

  /** A worker never rescues what it is itself running (R11). */
  private get ownId(): string {
    return this.workers.current?.id ?? '';
  }

  private get s(): string {
    return this.database.schema.quoted;
  }
}

const FINISHED = ['completed', 'failed', 'cancelled'];

const causeOf = (diedOf: string | null): RescueCause =>
  diedOf === 'session' || diedOf === 'exclusive' ? diedOf : 'lease';
