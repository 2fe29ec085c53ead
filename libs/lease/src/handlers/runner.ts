import { Injectable } from '@nestjs/common';
import type { HeldLease, LeaseWatcher } from '../claim/held-leases';
import type { InterruptionReason } from '../claim/interruption';
import { Exchange } from '../claim/exchange';
import type { LeasedJob } from '../claim/leased-job';
import { InvalidJobError, MAX_DELAY_MS, NonRetryableError, SnoozeError } from '../errors';
import { LeaseEvents, type LeaseEvent, jobRef as ref } from '../events/lease-events';
import { parseDuration } from '../options/duration';
import { type BackoffFunction, ResolvedOptions } from '../options/lease-options';
import { RESCUE_TEXT } from '../rescue/rescue.service';
import { describeError } from '../settle/describe-error';
import { encodeResult } from '../settle/encode-result';
import type { Answer, Outcome } from '../settle/outcome';
import { checkpointFor } from './checkpoint';
import { type HandlerDefinition, HandlerRegistry } from './handler-registry';
import { Lease } from './lease';
import { LeaseTools } from './lease-tools';
import { validatePayload } from './validate-payload';

/** Runs one leased job in its handler and reports what became of it. */
@Injectable()
export class Runner implements LeaseWatcher {
  constructor(
    private readonly registry: HandlerRegistry,
    private readonly exchange: Exchange,
    private readonly tools: LeaseTools,
    private readonly events: LeaseEvents,
    private readonly options: ResolvedOptions,
  ) {}

  /**
   * Runs the job. `onEnd` is called when the handler has ended, which for one that ignores its abort is long after the lease was given
   * up. Its outcome is then on its way, not yet answered: a slot need not wait for the database.
   */
  async run(held: HeldLease, onEnd: (held: HeldLease) => void): Promise<void> {
    const { job } = held;
    held.watch(this);
    if (held.settling) return onEnd(held); // Its deadline passed while it stood in the buffer: no run.
    if (this.events.wants('job.started')) this.events.emit({ type: 'job.started', ...ref(job) });
    const definition = this.registry.get(job.kind);
    let outcome: Outcome;
    try {
      if (!definition) throw new Error(`no handler of kind '${job.kind}' in this process`);
      const payload = definition.payload
        ? await validatePayload(definition.payload, job.payload, `Job ${job.id} (${job.kind})`)
        : job.payload;
      const checkpoint = job.checkpointVersion === 0 ? null : checkpointFor(job, definition.checkpoint);
      const handler = definition.singleton ?? (await definition.instance());
      const lease = new Lease(held, this.tools, definition.checkpoint.version);
      const result = await handler.handle({ ...job, payload, checkpoint }, lease);
      outcome = result === undefined ? COMPLETED : outcomeOfResult(result, this.options.resultMaxBytes);
    } catch (error) {
      outcome = outcomeOfError(error, held, definition);
    }
    // What it said last of its progress could not be written after its outcome.
    if (held.saving) await this.tools.saves.flush(held);
    if (held.completing) await this.tools.endCompletion(held).catch(() => held.reopen());
    if (held.settled) return this.settledByItself(held, onEnd);
    // Already settled by its deadline: whatever the handler says now is late.
    if (held.settling) this.events.emit({ type: 'job.refused', outcome: outcome.event, ...ref(job) });
    else this.exchange.post(job, outcome, this.announce, held);
    onEnd(held);
  }

  private settledByItself(held: HeldLease, onEnd: (held: HeldLease) => void): void {
    this.exchange.settledElsewhere(held);
    if (this.events.wants('job.completed')) this.events.emit({ type: 'job.completed', ...ref(held.job) });
    onEnd(held);
  }

  /** The worker's own end of way 3, with the same text and outcome; the slot stays taken until the handler really ends. */
  deadlinePassed(held: HeldLease): void {
    // Completed in a transaction that may have been rolled back: then this is called again.
    if (held.completing) return void this.tools.endCompletion(held).catch(() => held.reopen());
    if (held.settling) return;
    held.interrupt('deadline');
    this.exchange.post(held.job, { event: 'deadline', reason: RESCUE_TEXT.deadline }, this.announce, held);
  }

  goneWhileCompleting(held: HeldLease): void {
    this.tools.lookAtCompletion(held).catch(() => undefined);
  }

  interrupted({ job, settling }: HeldLease, reason: InterruptionReason): void {
    if (!settling) this.events.emit({ type: 'job.interrupted', reason, ...ref(job) });
  }

  private readonly announce = (job: LeasedJob, outcome: Outcome, answer: Answer): void => {
    if (answer.applied && outcome.event === 'complete' && !this.events.wants('job.completed')) return;
    const event = eventOf(job, outcome, answer);
    if (event && this.events.wants(event.type)) this.events.emit(event);
  };
}

const COMPLETED: Outcome = { event: 'complete', result: null };

function outcomeOfResult(result: unknown, maxBytes: number): Outcome {
  const encoded = encodeResult(result, maxBytes);
  if ('json' in encoded) return { event: 'complete', result: encoded.json };
  return { event: 'fatal', error: { name: 'ResultNotStorable', message: encoded.problem } };
}

/** Anything thrown after the abort counts as stopping for its reason. */
function outcomeOfError(error: unknown, held: HeldLease, definition: HandlerDefinition | undefined): Outcome {
  switch (held.interrupted) {
    case 'cancelled':
    case 'paused':
      return { event: 'stopped' };
    case 'drain':
      return { event: 'release' };
    case 'lease-lost':
      // Abandoned, never marked failed (R17): refused if the lease is gone, given back uncharged if it is still there.
      return { event: 'return' };
    case 'deadline':
    case undefined:
  }
  if (error instanceof SnoozeError) return { event: 'snooze', delayMs: Math.round(error.delayMs) };
  if (error instanceof NonRetryableError || error instanceof InvalidJobError)
    return { event: 'fatal', error: describeError(error) };
  const delayMs = delayOf(definition?.budget.backoff.of, held.job.attempt, error);
  return { event: 'fail', error: describeError(error), ...(delayMs === undefined ? {} : { delayMs }) };
}

/** What the kind's own function says; nothing that it does may keep the failure from being recorded. */
function delayOf(backoff: BackoffFunction | undefined, attempt: number, error: unknown): number | undefined {
  if (!backoff) return undefined;
  try {
    const ms = parseDuration(backoff(attempt, error));
    return ms === undefined ? undefined : Math.min(ms, MAX_DELAY_MS);
  } catch {
    return undefined;
  }
}

function eventOf(job: LeasedJob, outcome: Outcome, { applied, place = '' }: Answer): LeaseEvent | undefined {
  if (!applied) return { type: 'job.refused', outcome: outcome.event, ...ref(job) };
  switch (outcome.event) {
    case 'complete':
      return { type: 'job.completed', ...ref(job) };
    case 'fail':
    case 'fatal':
      return { type: 'job.failed', place, message: outcome.error.message, ...ref(job) };
    case 'deadline':
      return { type: 'job.failed', place, message: outcome.reason, ...ref(job) };
    case 'snooze':
      return { type: 'job.snoozed', ...ref(job) };
    case 'stopped':
      return { type: 'job.stopped', place, ...ref(job) };
    case 'release':
    case 'return':
      return { type: 'job.released', ...ref(job) };
    case 'giveback':
      return undefined;
  }
}
