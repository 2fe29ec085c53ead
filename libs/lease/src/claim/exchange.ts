import { Injectable, Logger } from '@nestjs/common';
import { BatchFollowUps } from '../batches/batch-follow-ups';
import type { JobError } from '../jobs/job.types';
import { ResolvedOptions } from '../options/lease-options';
import type { Answer, MoveRow, Outcome } from '../settle/outcome';
import { LeaseEvents, jobRef } from '../events/lease-events';
import { ThrottledLog } from '../events/throttled-log';
import { Database } from '../storage/database';
import { backoffMs, monotonicMs, sleep } from '../storage/delays';
import { errorText, isContentError, isLimit, isLocked } from '../storage/sql-errors';
import { CROWD } from '../storage/schema/functions/step.sql';
import type { ClaimReply, ClaimRequest, Claimer } from './claim-request';
import { moveSql, stepSql, whereaboutsSql } from './exchange.sql';
import { type HeldLease, HeldLeases } from './held-leases';
import { LaneMarks, type Ranges } from './lane-marks';
import { type Claimed, type LeasedJob, parseClaim } from './leased-job';
import {
  type Moved,
  type Pending,
  REFUSED,
  answerOf,
  isRecordOf,
  movesJson,
  ridesWithClaim,
  takeBatch,
} from './pending';
import { type StepRow, claimValues, readScan, settleValues } from './step-values';
import { readUnread } from './unread';
import { type Lane, WakeUp } from './wake-up';

const CONNECTIONS = 2;
const UNREAD_PAUSE_MS = 200;
const RECORDED = 'recorded earlier';
const FINISHED = ['completed', 'failed', 'cancelled'];
/** A member of a batch may have ended: so far as is known. */
const ENDED = [...FINISHED, RECORDED];
const COMPLETED: Moved = { place: 'completed', reason: null };

/**
 * All traffic about running jobs: outcomes and claims share round trips. Outcomes that arrive while one flush is on the wire go out
 * together with the next, so nothing waits when idle and batches are large when busy. An outcome stays here, and its lease
 * in the attested set, until the database has answered for it.
 */
@Injectable()
export class Exchange {
  private readonly logger = new Logger('Leasehold');
  private readonly trouble = new ThrottledLog(this.logger);
  private pending: Pending[] = [];
  /** Sent again when they have waited a little: somebody else has their leases locked. */
  private readonly locked = new Set<Pending>();
  private onWire = 0;
  private claims = 0;
  private scheduled = false;
  private failures = 0;
  private pausedUntil = 0;
  private pauseTimer: NodeJS.Timeout | undefined;
  private claimer: Claimer | undefined;
  private readonly stopping = new AbortController();
  private idleWaiters: (() => void)[] = [];
  private readonly marks = new LaneMarks();
  /** Lanes under a limit of the fleet, as the last claim saw it: a job that ends in one makes room for others. */
  private readonly capped = new Set<string>();
  /** Claims on the wire at once, at most. */
  private maxClaims = CONNECTIONS;

  constructor(
    private readonly database: Database,
    private readonly held: HeldLeases,
    private readonly options: ResolvedOptions,
    private readonly wakeUp: WakeUp,
    private readonly events: LeaseEvents,
    private readonly followUps: BatchFollowUps,
  ) {}

  setClaimer(claimer: Claimer | undefined): void {
    this.claimer = claimer;
    this.wake();
  }

  /** Records an outcome. Resolves when the database has answered, however long that takes; at once, as refused, after `stop`. */
  settle(job: LeasedJob, outcome: Outcome): Promise<Answer> {
    return new Promise((resolve) => this.post(job, outcome, (_job, _outcome, answer) => resolve(answer)));
  }

  /** The same with a callback, which for a job that did little is half of its cost. */
  post(job: LeasedJob, outcome: Outcome, answered: Pending['answered'], lease = this.held.get(job.key)): void {
    if (this.stopping.signal.aborted) return answered(job, outcome, REFUSED);
    if (lease) lease.settling = true;
    this.pending.push({ job, lease, outcome, repeat: false, refusals: 0, locked: 0, answered });
    this.wake();
  }

  /** A job whose outcome somebody else has written: in a transaction of the handler's. */
  settledElsewhere(lease: HeldLease): void {
    const { id, batchId } = lease.job;
    this.wakeUp.ended(id);
    if (batchId !== null) this.followUps.ended(batchId, id);
    this.release(lease);
  }

  /** Leases that somebody else in this process has moved: a job may have ended by that, on a request to cancel it. */
  movedElsewhere(rows: readonly MoveRow[]): void {
    for (const { job_id: jobId, batch_id: batchId, place } of rows) {
      if (!FINISHED.includes(place)) continue;
      this.wakeUp.ended(jobId);
      if (batchId !== '0') this.followUps.ended(batchId, jobId);
    }
  }

  /** Looks whether something can be sent, on the next turn of the loop: what happens in this turn goes together. */
  wake(): void {
    if (this.scheduled) return;
    this.scheduled = true;
    setImmediate(() => {
      this.scheduled = false;
      this.pump();
    });
  }

  /** Resolves when no outcome is waiting for its answer. */
  async idle(): Promise<void> {
    while (this.busy) {
      await new Promise<void>((resolve) => this.idleWaiters.push(resolve));
    }
  }

  /** One claim of its own, for callers that steer themselves. */
  async claim(request: ClaimRequest): Promise<ClaimReply> {
    return this.sendStep([], request);
  }

  /** Gives up on whatever is still unanswered: it is refused locally, and rescued. */
  stop(): void {
    this.stopping.abort();
    for (const pending of [...this.pending.splice(0), ...this.locked]) this.resolve(pending, REFUSED);
    this.locked.clear();
    this.notifyIdle();
  }

  private pump(): void {
    if (this.stopping.signal.aborted) return;
    while (this.onWire < CONNECTIONS) {
      const pauseMs = this.pausedUntil - monotonicMs();
      if (pauseMs > 0) {
        // A timer may fire a little early; without another one nobody would look again.
        this.pauseTimer ??= setTimeout(() => {
          this.pauseTimer = undefined;
          this.wake();
        }, Math.ceil(pauseMs)).unref();
        return;
      }
      const claim = this.claims < this.maxClaims ? this.claimer?.next() : undefined;
      const batch = this.takeBatch();
      if (batch.length === 0 && !claim) break;
      this.onWire++;
      if (claim) this.claims++;
      void this.send(batch, claim).finally(() => {
        this.onWire--;
        if (claim) this.claims--;
        this.notifyIdle();
        this.wake();
      });
    }
  }

  private get busy(): boolean {
    return this.pending.length > 0 || this.onWire > 0 || this.locked.size > 0;
  }

  private notifyIdle(): void {
    if (this.busy) return;
    for (const resolve of this.idleWaiters.splice(0)) resolve();
  }

  private takeBatch(): Pending[] {
    const { batch, rest } = takeBatch(this.pending);
    this.pending = rest;
    return batch;
  }

  private async send(batch: Pending[], claim: ClaimRequest | undefined): Promise<void> {
    const completions = batch[0] && ridesWithClaim(batch[0]) ? batch : [];
    const moves = completions.length > 0 ? [] : batch;
    await Promise.all([
      completions.length > 0 || claim ? this.exchange(completions, claim) : undefined,
      moves.length > 0 ? this.sendMoves(moves) : undefined,
    ]);
  }

  private async exchange(completions: Pending[], claim: ClaimRequest | undefined): Promise<void> {
    // Who asked is told, also when it has stopped asking meanwhile: what was leased must be started or given back.
    const { claimer } = this;
    const reply = await this.sendStep(completions, claim);
    if (claim) claimer?.receive(claim, reply);
  }

  private async sendStep(completions: Pending[], claim: ClaimRequest | undefined): Promise<ClaimReply> {
    const claimNo = claim ? this.held.openClaim() : 0;
    const sentAtMs = monotonicMs();
    const workerId = claim?.workerId ?? completions[0]?.job.workerId ?? '';
    // A claim speaks for one worker; completions of an earlier identity go on their own.
    if (claim && completions[0] && completions[0].job.workerId !== workerId) {
      this.pending.unshift(...completions);
      completions = [];
    }
    const ranges = this.marks.ranges(claim?.lanes ?? []);
    try {
      const [row] = await this.database.query<StepRow>(
        stepSql(this.database.schema.quoted),
        [workerId, ...settleValues(completions), claimNo, ...claimValues(claim, ranges, this.options.claim.maxBytes)],
        { name: 'leasehold_step' },
      );
      this.failures = 0;
      const claimed = parseClaim(row?.jobs ?? null, workerId, sentAtMs);
      let leases = claimed.jobs.map((job) => this.held.add(job));
      const applied = row?.applied == null ? undefined : new Set(row.applied.split(','));
      await this.answer(completions, ({ job }) => (applied && !applied.has(job.token) ? undefined : COMPLETED));
      if (row?.refused) return { ok: false, refused: true };
      const missing = await this.readRest(claimed);
      if (missing.size > 0) {
        this.pausedUntil = monotonicMs() + UNREAD_PAUSE_MS;
        for (const { job } of leases) if (missing.has(job.key)) void this.settle(job, { event: 'giveback' });
        leases = leases.filter(({ job }) => !missing.has(job.key));
      }
      const empty = claim && row?.scan ? this.learn(claim, claimed, ranges, row.scan) : [];
      return { ok: true, leases, empty };
    } catch (error) {
      if (completions.length > 0 && isLimit(error)) {
        // One lease that a transaction keeps locked must not hold up the others.
        if (claim && !isLocked(error)) this.marks.gaveUp(claim.lanes, ranges, (monotonicMs() - sentAtMs) * 1000);
        await this.sendMoves(completions);
        return { ok: false, refused: false };
      }
      if (claim && completions.length > 0 && isContentError(error)) {
        // It may be the claim that was refused: no verdict on an outcome that did not go alone.
        await this.sendStep(completions, undefined);
        completions = [];
      }
      if (claim && isLimit(error)) this.marks.gaveUp(claim.lanes, ranges, (monotonicMs() - sentAtMs) * 1000);
      await this.failed(completions, error);
      return { ok: false, refused: false };
    } finally {
      this.held.closeClaim(claimNo);
    }
  }

  /** @returns keys of the jobs that could not be read as a whole; they go back, uncharged */
  private async readRest(claimed: Claimed): Promise<Set<string>> {
    const { large, saved } = claimed;
    if (large.length === 0 && saved.length === 0) return new Set();
    try {
      return await readUnread(this.database, claimed);
    } catch (error) {
      const keys = new Set([...large, ...saved].map(({ key }) => key));
      this.trouble.warn('payloads', `Could not read ${keys.size} claimed jobs: ${errorText(error)}`);
      return keys;
    }
  }

  /** Moves the marks. @returns lanes that held nothing else */
  private learn(claim: ClaimRequest, { jobs, positions }: Claimed, ranges: Ranges, text: string): Lane[] {
    const { lanes } = claim;
    const { fleet, empty, capped, ...scan } = readScan(text, claim, jobs);
    for (const lane of lanes) {
      if (capped) this.capped.add(laneKey(lane));
      else if (this.capped.size > 0) this.capped.delete(laneKey(lane));
    }
    this.maxClaims = fleet >= CROWD ? 1 : CONNECTIONS;
    // A suspect comes alone, and has no mark.
    this.marks.saw({ lanes, ranges, jobs: jobs[0]?.suspect ? [] : jobs, positions, ...scan });
    return empty;
  }

  private async sendMoves(batch: Pending[]): Promise<void> {
    try {
      const rows = await this.database.query<MoveRow>(moveSql(this.database.schema.quoted), [movesJson(batch)]);
      this.failures = 0;
      const moved = new Map(rows.map((row) => [`${row.job_id}:${row.token}`, row]));
      await this.answer(batch, ({ job }) => moved.get(job.key));
    } catch (error) {
      await this.failed(batch, error);
    }
  }

  /** Gives each outcome its answer. One that moved nothing is looked for: it may be done already, or its lease locked, before it counts as lost. */
  private async answer(batch: Pending[], moveOf: (pending: Pending) => Moved | undefined): Promise<void> {
    const missed: Pending[] = [];
    for (const pending of batch) {
      const moved = moveOf(pending);
      if (moved) this.resolve(pending, answerOf(moved));
      else missed.push(pending);
    }
    if (missed.length === 0) return;
    try {
      const rows = await this.database.query<Whereabouts>(whereaboutsSql(this.database.schema.quoted), [
        missed.map((p) => p.job.id),
        missed.map((p) => p.job.token),
        missed.map((p) => p.job.workerId),
      ]);
      const found = new Map(rows.map((row) => [`${row.job_id}:${row.token}`, row]));
      for (const pending of missed) {
        const { held = false, outcome = null } = found.get(pending.job.key) ?? {};
        if (held) void this.sendLater(pending);
        else this.resolve(pending, recorded(pending, outcome));
      }
    } catch (error) {
      await this.failed(missed, error);
    }
  }

  /** Somebody has its lease locked just now: another try in a moment, while everything else goes on. */
  private async sendLater(pending: Pending): Promise<void> {
    if (this.stopping.signal.aborted) return this.resolve(pending, REFUSED);
    this.locked.add(pending);
    await sleep(backoffMs(pending.locked++, 20, 1000), this.stopping.signal);
    if (!this.locked.delete(pending)) return;
    this.pending.push(pending);
    this.wake();
  }

  private resolve({ job, lease, outcome, answered }: Pending, answer: Answer): void {
    if (lease) this.release(lease);
    if (answer.place !== undefined && FINISHED.includes(answer.place)) this.wakeUp.ended(job.id);
    if (job.batchId !== null && answer.place !== undefined && ENDED.includes(answer.place))
      this.followUps.ended(job.batchId, job.id);
    if (answer.place === 'failed') this.events.emit(finalFailure(job, answer.reason ?? ''));
    answered(job, outcome, answer);
  }

  private release(lease: HeldLease): void {
    const { queue, kind } = lease.job;
    this.held.remove(lease);
    if (this.capped.has(laneKey([queue, kind]))) this.wakeUp.notify([[queue, kind]]);
  }

  /** Nothing is ever dropped: bad content is narrowed down to its row, everything else is sent again after a pause. */
  private async failed(batch: Pending[], error: unknown): Promise<void> {
    const [only] = batch;
    if (isContentError(error) && only && batch.length === 1 && only.refusals < 2) {
      return this.refusedByContent(only, error);
    }
    if (isContentError(error) && batch.length > 1) {
      const half = Math.ceil(batch.length / 2);
      for (const part of [batch.slice(0, half), batch.slice(half)]) {
        await (part[0] && ridesWithClaim(part[0]) ? this.sendStep(part, undefined) : this.sendMoves(part));
      }
      return;
    }
    if (!isLimit(error)) this.marks.reset();
    const pauseMs = backoffMs(this.failures++, 20, 2000);
    this.pausedUntil = monotonicMs() + pauseMs;
    this.trouble.warn('exchange', `Could not write to the database, trying again: ${errorText(error)}`);
    if (this.stopping.signal.aborted) {
      for (const pending of batch) this.resolve(pending, REFUSED);
      return;
    }
    for (const pending of batch) pending.repeat = true;
    this.pending.unshift(...batch);
    await sleep(pauseMs, this.stopping.signal);
  }

  private refusedByContent(pending: Pending, error: unknown): Promise<void> {
    const plain: JobError = {
      name: 'OutcomeNotStorable',
      message: `the outcome could not be stored: ${errorText(error)}`,
    };
    this.logger.error(`Job ${pending.job.id} (${pending.job.kind}): ${plain.message}`);
    // Refused even without a word of its own: then it is not the content, and is sent again like anything else.
    const described =
      pending.refusals++ === 0 ? plain : { name: plain.name, message: 'the outcome could not be stored' };
    pending.outcome = { event: 'fatal', error: described };
    return this.sendMoves([pending]);
  }
}

interface Whereabouts extends Record<string, unknown> {
  job_id: string;
  token: string;
  held: boolean;
  outcome: string | null;
}

/** Of one whose lease is gone. A job that was given back leaves no record. */
function recorded({ repeat, outcome }: Pending, found: string | null): Answer {
  const applied = repeat && (outcome.event === 'giveback' || (found !== null && isRecordOf(outcome, found)));
  return applied ? { applied, place: RECORDED } : REFUSED;
}

const finalFailure = (job: LeasedJob, reason: string) =>
  ({ type: 'job.finally-failed', reason, ...jobRef(job) }) as const;

const laneKey = ([queue, kind]: Lane): string => `${queue}\0${kind}`;
