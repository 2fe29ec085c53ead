import { createHash } from 'node:crypto';
import type { ClientBase } from 'pg';
import type { EntityManager } from 'typeorm';
import type { HeldLease } from '../claim/held-leases';
import { CheckpointError, InvalidOptionError, LeaseLostError, SnoozeError } from '../errors';
import { DURATION_SYNTAX, type Duration, parseDuration } from '../options/duration';
import type { TransactionTarget } from '../storage/caller-transaction';
import { encodeResult } from '../settle/encode-result';
import { storable } from '../settle/describe-error';
import type { LeaseTools, TransactionOptions } from './lease-tools';

const MESSAGE_CHARS = 500;
const LINE_CHARS = 2000;

/** The right to run one job now, as its handler sees it. Everything that it writes is refused when the lease is lost (R17). */
export class Lease {
  constructor(
    private readonly held: HeldLease,
    private readonly tools: LeaseTools,
    private readonly checkpointVersion = 1,
  ) {}

  /** The fencing number: a bigint as decimal text, larger for every later claim of the job. Hand it to systems that can compare it. */
  get token(): string {
    return this.held.job.token;
  }

  /** What names this lease to others that check it, `batches.add` for one: job, token, worker. */
  get fence(): { jobId: string; token: string; workerId: string } {
    const { id, token, workerId } = this.held.job;
    return { jobId: id, token, workerId };
  }

  /** Counts runs whose failure was the handler's own; the same number again after a rescue (R12). */
  get attempt(): number {
    return this.held.job.attempt;
  }

  /** When the run must have ended, by the database's clock; null = no deadline. */
  get deadlineAt(): Date | null {
    return this.held.deadlineAt;
  }

  /** Milliseconds left until the deadline, on this process's monotonic clock; Infinity without one. */
  get remainingMs(): number {
    return this.held.remainingMs;
  }

  /** Aborts when the handler should stop; `signal.reason` is a JobInterruptedError whose `reason` says why. Hand it to fetch and the like. */
  get signal(): AbortSignal {
    return this.held.signal;
  }

  /**
   * Throws if the handler should stop: the signal's reason, or LeaseLostError when this process can no longer be sure that the lease is
   * its own. Call it before an effect that must not happen twice.
   */
  assertHeld(): void {
    this.held.throwIfInterrupted();
    if (this.held.lost || !this.tools.trusted) {
      throw new LeaseLostError(
        this.held.job.id,
        this.token,
        'no beat has reached the database for too long to be sure of the lease',
      );
    }
  }

  /**
   * An idempotency key for one effect of this job: the same for every run of it, different for every item and job (R20). 36 characters, in
   * the form of a UUID.
   */
  key(item: string | number = ''): string {
    const hash = createHash('sha256')
      .update(`leasehold:${this.held.job.id}:${typeof item}:${item}`)
      .digest();
    hash[6] = ((hash[6] ?? 0) & 0x0f) | 0x80;
    hash[8] = ((hash[8] ?? 0) & 0x3f) | 0x80;
    const hex = hash.toString('hex');
    return `${hex.slice(0, 8)}-${hex.slice(8, 12)}-${hex.slice(12, 16)}-${hex.slice(16, 20)}-${hex.slice(20, 32)}`;
  }

  /**
   * Saves how far the job has come: the next run gets it as `job.checkpoint` (R23). Resolves when it is stored; the last one stands. A
   * boundary: after the save it throws the signal's reason if the handler should stop, so what is done so far is never lost.
   * NUL and lone surrogates become U+FFFD. While a transaction of your own has the lease locked (`checkpointIn`), it waits for that one's end.
   * @throws LeaseLostError; LeaseSetupError in `lease.transaction` after `checkpointIn`; CheckpointError if it is no JSON or larger than `checkpointMaxBytes`; JobInterruptedError
   */
  async checkpoint(state: unknown): Promise<void> {
    await this.assertGoing('checkpoint()');
    await this.tools.saves.checkpoint(this.held, this.encode(state), this.checkpointVersion);
    this.held.throwIfInterrupted();
  }

  /**
   * The same in a transaction of the handler's (`lease.transaction`, or any other in Leasehold's database): checkpoint and effects are there both
   * or neither, so the next run goes on exactly after them. Locks the lease to the end of the transaction.
   */
  async checkpointIn(target: TransactionTarget, state: unknown): Promise<void> {
    await this.assertGoing();
    await this.tools.checkpointIn(target, this.held, this.encode(state), this.checkpointVersion);
  }

  /** Says how far the job is, for those who watch it: the last word counts, written within about a second. `message` up to 500 characters. */
  progress(current: number, total?: number, message?: string): void {
    if (!Number.isFinite(current) || (total !== undefined && !Number.isFinite(total))) {
      throw new InvalidOptionError(`progress(${current}, ${total}): current and total must be finite numbers`);
    }
    this.tools.saves.progress(this.held, {
      current,
      ...(total === undefined ? {} : { total }),
      ...(message === undefined ? {} : { message: clip(String(message), MESSAGE_CHARS) }),
    });
  }

  /** Adds a line to the job's log, of which the last 200 are kept; up to 2000 characters, written within about a second. */
  log(line: string): void {
    this.tools.saves.log(this.held, clip(String(line), LINE_CHARS));
  }

  /**
   * Moves the deadline to this long from now, if that is later, and at most `maxExtension` after the claim.
   * @returns the deadline; null if the job has none
   * @throws LeaseLostError, also when the deadline has passed
   */
  async extend(duration: Duration): Promise<Date | null> {
    const ms = durationMs('extend', duration);
    await this.assertGoing('extend()');
    await this.tools.extend(this.held, ms);
    return this.held.deadlineAt;
  }

  /** Ends the run; the job comes back after this long without an attempt spent, at most `maxSnoozes` times. Throws: nothing after it is done. */
  snooze(duration: Duration): never {
    throw new SnoozeError(durationMs('snooze', duration));
  }

  /**
   * Runs `work` in a transaction of your own database, which must be Leasehold's: its writes are there only if this run still held the lease
   * when they were committed. Never by a zombie, then; *exactly once* with `completeIn` or `checkpointIn` inside, since else a run that dies
   * after the commit is repeated. READ COMMITTED; a write conflict (40001, 40P01) repeats it, so `work` may run more than once.
   *
   * With TypeORM: the `dataSource` given, else the module's `connection.dataSource`, else the application's DataSource. With `pg`: `{ client }`, a
   * connected client without an open transaction. A process that freezes inside is cut off by the server after one TTL.
   * @throws LeaseLostError, everything rolled back; what `work` throws, everything rolled back
   */
  transaction<T>(
    work: (manager: EntityManager) => Promise<T>,
    options?: Omit<TransactionOptions, 'client'>,
  ): Promise<T>;
  transaction<T>(work: (client: ClientBase) => Promise<T>, options: { client: ClientBase }): Promise<T>;
  async transaction<T>(work: (target: never) => Promise<T>, options: TransactionOptions = {}): Promise<T> {
    this.assertHeld();
    await this.assertGoing('transaction()');
    return this.tools.transaction(this.held, work as (target: TransactionTarget) => Promise<T>, options);
  }

  /**
   * Completes the job in the transaction: result, outcome and effects are there all or none. Whatever the handler returns afterwards is ignored.
   * @throws LeaseLostError; NonRetryableError for a result that cannot be stored
   */
  async completeIn(target: TransactionTarget, result?: unknown): Promise<void> {
    await this.assertGoing();
    await this.tools.completeIn(target, this.held, result);
  }

  private encode(state: unknown): string {
    const encoded = encodeResult(state, this.tools.checkpointMaxBytes, 'checkpoint');
    if ('problem' in encoded) throw new CheckpointError(encoded.problem);
    if (encoded.json === null) throw new CheckpointError('the checkpoint is undefined, which JSON does not know');
    return encoded.json;
  }

  /**
   * Once the deadline has passed, or the job was completed, nothing more is to be written about it; a completion that was rolled back is none.
   * `outside`: what is about to be written in a transaction of its own.
   */
  private async assertGoing(outside?: string): Promise<void> {
    if (outside) this.tools.assertNotInside(this.held, outside);
    if (this.held.completing) await this.tools.lookAtCompletion(this.held);
    if (!this.held.settling) return;
    this.held.throwIfInterrupted();
    throw new LeaseLostError(
      this.held.job.id,
      this.token,
      'the run has ended already, or its completion is not committed yet',
    );
  }
}

const clip = (text: string, limit: number): string => storable(text.length > limit ? `${text.slice(0, limit)}…` : text);

function durationMs(what: string, duration: Duration): number {
  const ms = parseDuration(duration);
  if (ms === undefined) {
    throw new InvalidOptionError(`${what}(${JSON.stringify(duration)}): it must be a duration (${DURATION_SYNTAX})`);
  }
  return ms;
}
