import { Injectable } from '@nestjs/common';
import { BatchFollowUps } from '../batches/batch-follow-ups';
import { WakeUp } from '../claim/wake-up';
import { IllegalTransitionError, InvalidJobError, JobContendedError, UnknownJobError } from '../errors';
import { LeaseEvents } from '../events/lease-events';
import { didYouMean } from '../options/suggest';
import { isName } from '../options/validators';
import { Database } from '../storage/database';
import { backoffMs, sleep } from '../storage/delays';
import { type JobFilter, assertId, filterOf } from './job-filter';
import { JOB_STATES, type JobState } from './job.types';
import { countIdsSql, idsSql, steerSql } from './steering.sql';
import { COMMANDS, type CommandEffect, type JobCommand } from './transitions';

export interface SteerOptions {
  /** Why; stands in the job's `reason` when it is cancelled. Up to 500 bytes. */
  reason?: string;
}

/** What a command has done to one job. */
export interface Steered {
  jobId: string;
  /** False: it was so already, nothing was changed. */
  changed: boolean;
  /** Written on the lease of a running job: it ends when its handler stops, or its worker is lost, or it completes first. */
  requested: boolean;
  /** The state before. */
  from: JobState;
  /** The state now; null: it is deleted. */
  state: JobState | null;
}

export interface SteerManyOptions extends SteerOptions {
  /** Jobs at most, 1 to 10 000. Default 1000. The oldest first. */
  limit?: number;
  /** `next` of the call before. */
  after?: string;
  /** For `reprioritise`. */
  priority?: number;
}

export interface SteerSummary {
  changed: number;
  requested: number;
  unchanged: number;
  /** Moved meanwhile to a state in which the command is not possible, or were deleted. */
  skipped: number;
  /** There are more jobs that fit: pass this as `after` to go on; null: that was all. */
  next: string | null;
}

interface SteerRow extends Record<string, unknown> {
  job: string;
  answer:
    | CommandEffect
    | 'illegal'
    | 'unknown'
    | 'contended'
    | 'key-held'
    | 'needs-failed'
    | 'batch-stopping'
    | 'member'
    | 'referenced';
  state: JobState;
  nowIn: JobState | null;
  token: string | null;
  worker: string | null;
  holder: string | null;
  queue: string | null;
  kind: string | null;
  batch: string;
}

const PART = 200;
const MAX_MANY = 10_000;
const CONTENDED_TRIES = 3;
const REQUESTS: Partial<Record<JobCommand, 'cancel' | 'pause'>> = {
  cancel: 'cancel',
  pause: 'pause',
  forceCancel: 'cancel',
};

/**
 * Commands from outside: what each does in which state stands in `transitions.ts` (R22). One is on the record before it is answered; the
 * worker of a running job hears of it at once by NOTIFY, and by its next beat in any case (R21).
 */
@Injectable()
export class JobSteering {
  constructor(
    private readonly database: Database,
    private readonly wakeUp: WakeUp,
    private readonly events: LeaseEvents,
    private readonly followUps: BatchFollowUps,
  ) {}

  /** @throws UnknownJobError, IllegalTransitionError, JobContendedError */
  async one(command: JobCommand, id: string, { reason, priority }: SteerManyOptions = {}): Promise<Steered> {
    assertId(id, 'id');
    assertCommand(command, { reason, priority });
    let [row] = await this.send(command, [id], reason, priority);
    for (let tries = 0; row?.answer === 'contended' && tries < CONTENDED_TRIES; tries++) {
      await sleep(backoffMs(tries, 20, 200));
      [row] = await this.send(command, [id], reason, priority);
    }
    if (!row || row.answer === 'unknown') throw new UnknownJobError(id);
    switch (row.answer) {
      case 'contended':
        throw new JobContendedError(id);
      case 'illegal':
        throw new IllegalTransitionError(id, command, row.state, hint(command, row.state));
      case 'key-held':
        throw new IllegalTransitionError(id, command, row.state, `its key is held by job ${row.holder}`);
      case 'needs-failed':
        throw new IllegalTransitionError(
          id,
          command,
          row.state,
          `it needs job ${row.holder}, which failed or was cancelled: retry that first`,
        );
      case 'batch-stopping':
        throw new IllegalTransitionError(id, command, row.state, `its batch ${row.batch} is being cancelled`);
      case 'member':
        throw new IllegalTransitionError(
          id,
          command,
          row.state,
          `it is a member of batch ${row.batch}: delete that as a whole`,
        );
      case 'referenced':
        throw new IllegalTransitionError(id, command, row.state, 'a foreign key of another table holds it');
      default:
        return steered(row);
    }
  }

  /** Every job that fits and that the command is possible for, one after the other, at most `limit`; each for itself. */
  async many(command: JobCommand, filter: JobFilter, options: SteerManyOptions = {}): Promise<SteerSummary> {
    const { limit = 1000 } = options;
    if (!Number.isInteger(limit) || limit < 1 || limit > MAX_MANY) {
      throw new InvalidJobError(`limit = ${limit} must be a whole number from 1 to ${MAX_MANY}`, 'limit');
    }
    assertCommand(command, options);
    const summary: SteerSummary = { changed: 0, requested: 0, unchanged: 0, skipped: 0, next: null };
    const states = statesFor(command, filter);
    if (options.after !== undefined) assertId(options.after, 'after');
    let after = options.after ?? '0';
    for (let left = limit; left > 0 && states.length > 0;) {
      const ids = await this.ids(states, filter, after, Math.min(PART, left));
      await this.add(summary, command, ids, options);
      left -= ids.length;
      after = ids.at(-1) ?? after;
      if (ids.length < PART && left > 0) return summary;
    }
    const more = states.length > 0 && (await this.ids(states, filter, after, 1)).length > 0;
    return { ...summary, next: more ? after : null };
  }

  /** These jobs, one after the other, each for itself. */
  async these(command: JobCommand, ids: string[], options: SteerOptions = {}): Promise<Omit<SteerSummary, 'next'>> {
    assertCommand(command, options);
    const summary = { changed: 0, requested: 0, unchanged: 0, skipped: 0 };
    for (let at = 0; at < ids.length; at += PART) await this.add(summary, command, ids.slice(at, at + PART), options);
    return summary;
  }

  /** How many jobs `many` would do the command to, counted to 10 000. */
  async preview(command: JobCommand, filter: JobFilter): Promise<number> {
    assertKnown(command);
    const states = statesFor(command, filter);
    if (states.length === 0) return 0;
    const { kind, queue, tag, batchId } = filterOf(filter);
    const [row] = await this.database.query<{ count: number }>(countIdsSql(this.s, states), [
      '0',
      kind,
      queue,
      tag,
      MAX_MANY,
      batchId,
    ]);
    return row?.count ?? 0;
  }

  private async ids(states: JobState[], filter: JobFilter, after: string, limit: number): Promise<string[]> {
    const { kind, queue, tag, batchId } = filterOf(filter);
    const rows = await this.database.query<{ id: string }>(idsSql(this.s, states), [
      after,
      kind,
      queue,
      tag,
      limit,
      batchId,
    ]);
    return rows.map(({ id }) => id);
  }

  private async add(
    summary: Omit<SteerSummary, 'next'>,
    command: JobCommand,
    ids: string[],
    { reason, priority }: SteerManyOptions,
  ): Promise<void> {
    const rows = ids.length === 0 ? [] : await this.send(command, ids, reason, priority);
    for (const row of rows) summary[outcomeOf(row)]++;
  }

  private async send(
    command: JobCommand,
    ids: string[],
    reason: string | undefined,
    priority: number | undefined,
  ): Promise<SteerRow[]> {
    const rows = await this.database.query<SteerRow>(steerSql(this.s), [command, ids, reason ?? null, priority ?? 0]);
    this.announce(command, rows);
    return rows;
  }

  private announce(command: JobCommand, rows: SteerRow[]): void {
    const lanes = new Map<string, [string, string]>();
    const stops: [job: string, token: string, request: 'cancel' | 'pause'][] = [];
    for (const { job, answer, state, nowIn, token, queue, kind, batch } of rows) {
      if (batch !== '0' && nowIn === 'cancelled' && isDone(answer)) this.followUps.ended(batch, job);
      if (nowIn === 'cancelled') this.wakeUp.ended(job);
      const request = REQUESTS[command];
      if (token !== null && request) stops.push([job, token, request]);
      if (nowIn === 'ready' && queue !== null && kind !== null) lanes.set(`${queue}\0${kind}`, [queue, kind]);
      if (isDone(answer) && this.events.wants('job.steered')) {
        this.events.emit({ type: 'job.steered', command, jobId: job, from: state, to: nowIn ?? 'deleted' });
      }
    }
    if (lanes.size > 0) this.wakeUp.notify([...lanes.values()]);
    if (stops.length > 0) this.wakeUp.stop(stops);
  }

  private get s(): string {
    return this.database.schema.quoted;
  }
}

function assertKnown(command: JobCommand): void {
  if (!Object.hasOwn(COMMANDS, command)) {
    throw new InvalidJobError(
      `There is no command '${String(command)}'${didYouMean(String(command), Object.keys(COMMANDS))}`,
      'command',
    );
  }
}

/** @throws InvalidJobError */
export function assertReason(reason: string | undefined): void {
  if (reason !== undefined && !isName(reason, 500)) {
    throw new InvalidJobError('reason must be text of 1 to 500 bytes without NUL or lone surrogates', 'reason');
  }
}

function assertCommand(
  command: JobCommand,
  { reason, priority }: { reason?: string | undefined; priority?: number | undefined },
): void {
  assertKnown(command);
  assertReason(reason);
  if (command !== 'reprioritise') {
    if (priority === undefined) return;
    throw new InvalidJobError(`priority is for reprioritise, not for ${command}`, 'priority');
  }
  if (!Number.isInteger(priority) || Math.abs(Number(priority) + 0.5) > 32_767.5) {
    throw new InvalidJobError(`priority = ${priority} must be a whole number from -32768 to 32767`, 'priority');
  }
}

/** The states in which the command changes something, of those that the filter names. */
const statesFor = (command: JobCommand, filter: JobFilter): JobState[] => {
  const { state } = filterOf(filter);
  return JOB_STATES.filter((candidate) => {
    const effect = COMMANDS[command]?.[candidate];
    return effect !== undefined && effect !== 'unchanged' && (state === undefined || state === candidate);
  });
};

/** Answers that say that nothing was changed. */
const UNDONE = new Set<SteerRow['answer']>([
  'illegal',
  'unknown',
  'contended',
  'key-held',
  'needs-failed',
  'batch-stopping',
  'member',
  'referenced',
  'unchanged',
]);

const isDone = (answer: SteerRow['answer']): boolean => !UNDONE.has(answer);

const outcomeOf = ({ answer }: SteerRow): 'changed' | 'requested' | 'unchanged' | 'skipped' =>
  answer === 'requested' || answer === 'unchanged' ? answer : isDone(answer) ? 'changed' : 'skipped';

const steered = ({ job, answer, state, nowIn }: SteerRow): Steered => ({
  jobId: job,
  changed: answer !== 'unchanged',
  requested: answer === 'requested',
  from: state,
  state: nowIn,
});

/** What to do instead. */
function hint(command: JobCommand, state: JobState): string {
  if (state === 'running') return command === 'delete' ? 'cancel or forceCancel it first' : 'wait for it, or cancel it';
  if (state === 'completed' || state === 'failed' || state === 'cancelled')
    return 'it has finished; retry runs it again';
  if (state === 'paused') return 'resume it first';
  if (command === 'retry') return 'it has not finished; runNow starts a scheduled one at once';
  return '';
}
