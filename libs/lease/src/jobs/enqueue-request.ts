import { InvalidJobError, MAX_DELAY_MS } from '../errors';
import type { HandlerDefinition } from '../handlers/handler-registry';
import { validatePayload } from '../handlers/validate-payload';
import { DURATION_SYNTAX, type Duration, parseDuration } from '../options/duration';
import type { BackoffOptions, ResolvedBudget, ResolvedOptions } from '../options/lease-options';
import { resolveBackoffOption } from '../options/resolve-options';
import { isName } from '../options/validators';
import { didYouMean } from '../options/suggest';
import { holdsUnstorable } from '../settle/encode-result';
import { type CallerTransaction, TRANSACTION_KEYS } from '../storage/caller-transaction';

/** The caller's own transaction: the jobs are visible at its commit and gone at its rollback. At most one of these. */
export type EnqueueTransaction = CallerTransaction;

/**
 * What an enqueue does while an unfinished job holds the same key:
 * - `ignore`: nothing is enqueued; the job that holds it is answered.
 * - `replace`: if that job has never started, it gets this payload and time; else as `ignore`.
 * - `serial`: one running and one waiting. If it runs, this one waits until it has ended, unless one waits already. If it does not run, as
 *   `ignore`, and it cannot start before the caller's transaction ends: it sees what the caller has written.
 * - `{ throttle }`: nothing for so long after a job was enqueued, even if that one has finished.
 * - `{ debounce }`: runs so long after the last call, with its payload; `maxWait`: at most so long after the first.
 */
export type KeyMode =
  'ignore' | 'replace' | 'serial' | { throttle: Duration } | { debounce: Duration; maxWait?: Duration };

export interface EnqueueOptions extends EnqueueTransaction {
  /** Not before this moment, by the database's clock: a Date, or ISO 8601 text with a zone. */
  runAt?: Date | string;
  /** Not before this long from now, by the database's clock. */
  delay?: Duration;
  /** -32768 to 32767, lower runs first. Default: the kind's. */
  priority?: number;
  /** Default: the kind's. */
  queue?: string;
  maxAttempts?: number;
  maxCrashes?: number;
  /** How long one run may take; 'off' = for ever. */
  deadline?: Duration | 'off';
  maxSnoozes?: number;
  /** Exponential, or a duration that is always the same. */
  backoff?: BackoffOptions | Duration;
  /** At most 20 of at most 100 bytes. */
  tags?: string[];
  /** Unique while its job is unfinished, within its kind (or queue: `keyScope`). 1 to 500 bytes. A repeat of the call is then safe. */
  key?: string;
  /** Default 'ignore'. */
  keyMode?: KeyMode;
  /** Where the key is unique. Default 'kind'. */
  keyScope?: 'kind' | 'queue';
  /** Jobs of the same key, of whatever kind, share `concurrencyPerKey` places in the whole fleet. 1 to 200 bytes. */
  concurrencyKey?: string;
  concurrencyPerKey?: number;
}

const OPTION_KEYS: string[] = [
  'runAt',
  'delay',
  'priority',
  'queue',
  'maxAttempts',
  'maxCrashes',
  'maxSnoozes',
  'backoff',
  'deadline',
  'tags',
  'key',
  'keyMode',
  'keyScope',
  'concurrencyKey',
  'concurrencyPerKey',
  ...TRANSACTION_KEYS,
];
const INT_MAX = 2_147_483_647;

/** All of a job but its payload, checked: the beginning of its group's JSON for `enqueue_v1`, and the lane to announce. */
export interface PreparedHead {
  json: string;
  queue: string;
  kind: string;
  definition: HandlerDefinition | undefined;
  /** It has a unique key. */
  keyed: boolean;
}

/** One job, checked and ready to be sent. */
export interface PreparedJob {
  head: PreparedHead;
  /** The head's, and what is this job's alone. */
  json: string;
  /** The payload's JSON. */
  payload: string;
  /** Its name in its batch; null: it has none; undefined: it is no member. */
  member?: string | null;
}

/**
 * Checks a payload, by the kind's DTO if it has one.
 * @throws InvalidJobError naming the field
 */
export function preparePayload(
  payload: unknown,
  { kind, definition }: PreparedHead,
  options: ResolvedOptions,
): string | Promise<string> {
  const what = `Job of kind '${kind}'`;
  const json = encodePayload(payload, options.payloadMaxBytes, what);
  return definition?.payload ? validatePayload(definition.payload, payload, what).then(() => json) : json;
}

/**
 * Checks a job's options and resolves its budgets: job over kind over module. (A queue's own deadline is looked up by `enqueue_v1`.)
 * @throws InvalidJobError naming the field; nothing has been written
 */
export function prepareHead(
  kind: string,
  definition: HandlerDefinition | undefined,
  given: EnqueueOptions,
  options: ResolvedOptions,
): PreparedHead {
  const what = `Job of kind '${kind}'`;
  const invalid = (field: string, value: unknown, must: string): never => {
    throw new InvalidJobError(`${what}: ${field} = ${describe(value)} is not allowed: it must be ${must}`, field);
  };
  const integer = (
    field: 'priority' | 'maxAttempts' | 'maxCrashes' | 'maxSnoozes' | 'concurrencyPerKey',
    min: number,
    max: number,
    fallback: number,
  ): number => {
    const value = given[field];
    if (value === undefined) return fallback;
    return Number.isInteger(value) && value >= min && value <= max
      ? value
      : invalid(field, value, `a whole number from ${min} to ${max}`);
  };

  for (const key of Object.keys(given)) {
    if (!OPTION_KEYS.includes(key)) {
      throw new InvalidJobError(`${what}: there is no option '${key}'${didYouMean(key, OPTION_KEYS)}`, key);
    }
  }
  if (!isName(kind)) invalid('kind', kind, 'text of 1 to 200 bytes without NUL or lone surrogates');
  const budget = definition?.budget ?? options.budget;
  const queue = given.queue ?? definition?.queue ?? 'default';
  if (!isName(queue)) invalid('queue', queue, 'text of 1 to 200 bytes without NUL or lone surrogates');
  const tags = given.tags ?? [];
  if (!Array.isArray(tags) || tags.length > 20 || !tags.every((tag) => isName(tag, 100))) {
    invalid('tags', tags, 'at most 20 texts of 1 to 100 bytes without NUL or lone surrogates');
  }

  const fields = {
    queue,
    kind,
    priority: integer('priority', -32_768, 32_767, definition?.priority ?? 0),
    maxAttempts: integer('maxAttempts', 1, INT_MAX, budget.maxAttempts),
    maxCrashes: integer('maxCrashes', 1, INT_MAX, budget.maxCrashes),
    maxReleases: budget.maxReleases,
    maxSnoozes: integer('maxSnoozes', 0, INT_MAX, budget.maxSnoozes),
    ...(definition?.chargeLost ? { chargeLost: true } : {}),
    deadlineMs: deadlineOf(given.deadline, budget.deadlineMs, (value) =>
      invalid('deadline', value, `'off' or a duration of at least 1 ms (${DURATION_SYNTAX})`),
    ),
    deadlineFrom: given.deadline === undefined && !definition?.ownDeadline ? 'module' : 'job',
    ...backoffOf(given, budget),
    ...(tags.length > 0 ? { tags } : {}),
    ...whenOf(given, invalid),
    ...placeOf(given, integer, definition?.concurrencyPerKey ?? 1, invalid),
    ...keyOf(given, kind, queue, invalid),
  };
  const json = JSON.stringify(fields).slice(0, -1);
  return { json, queue, kind, definition, keyed: given.key !== undefined };
}

/**
 * One job of a head: its payload checked, and its concurrency key asked for.
 * @throws InvalidJobError naming the field
 */
export function prepareJob(
  payload: unknown,
  head: PreparedHead,
  options: ResolvedOptions,
): PreparedJob | Promise<PreparedJob> {
  const json = preparePayload(payload, head, options);
  const rest = (text: string): PreparedJob => ({ head, json: withConcurrencyKey(head, payload), payload: text });
  return typeof json === 'string' ? rest(json) : json.then(rest);
}

function withConcurrencyKey({ json, kind, definition }: PreparedHead, payload: unknown): string {
  if (!definition?.concurrencyKey || json.includes('"concurrencyKey":')) return json;
  const key: unknown = definition.concurrencyKey(payload as never);
  if (key === undefined) return json;
  if (!isName(key)) {
    throw new InvalidJobError(
      `Job of kind '${kind}': its concurrencyKey function returned ${describe(key)}: it must be text of 1 to 200 bytes, or undefined`,
      'concurrencyKey',
    );
  }
  return `${json},"concurrencyKey":${JSON.stringify(key)},"concurrencyMax":${definition.concurrencyPerKey}`;
}

type Refuse = (field: string, value: unknown, must: string) => never;

function backoffOf(
  given: EnqueueOptions,
  { backoff }: ResolvedBudget,
): { backoff?: { baseMs: number; maxMs: number } } {
  let { baseMs, maxMs } = backoff;
  if (given.backoff !== undefined) {
    try {
      ({ baseMs, maxMs } = resolveBackoffOption(given.backoff, backoff));
    } catch (error) {
      throw new InvalidJobError((error as Error).message, 'backoff', { cause: error });
    }
  }
  return baseMs === 1000 && maxMs === 86_400_000 ? {} : { backoff: { baseMs, maxMs } };
}

function placeOf(
  given: EnqueueOptions,
  integer: (field: 'concurrencyPerKey', min: number, max: number, fallback: number) => number,
  fallback: number,
  refuse: Refuse,
): { concurrencyKey?: string; concurrencyMax?: number } {
  const concurrencyMax = integer('concurrencyPerKey', 1, 1_000_000, fallback);
  if (given.concurrencyKey === undefined) return {};
  return isName(given.concurrencyKey)
    ? { concurrencyKey: given.concurrencyKey, concurrencyMax }
    : refuse('concurrencyKey', given.concurrencyKey, 'text of 1 to 200 bytes without NUL or lone surrogates');
}

interface KeyFields {
  keySpace?: string;
  key?: string;
  keyMode?: string;
  keyPeriodMs?: number;
  keyMaxWaitMs?: number;
  delayMs?: number;
}

function keyOf(given: EnqueueOptions, kind: string, queue: string, refuse: Refuse): KeyFields {
  const { key, keyMode: mode = 'ignore', keyScope: scope = 'kind' } = given;
  if (key === undefined) {
    const without = (['keyMode', 'keyScope'] as const).find((field) => given[field] !== undefined);
    return without ? refuse(without, given[without], "absent without a 'key'") : {};
  }
  if (!isName(key, 500)) return refuse('key', key, 'text of 1 to 500 bytes without NUL or lone surrogates');
  if (scope !== 'kind' && scope !== 'queue') return refuse('keyScope', scope, "'kind' or 'queue'");
  const fields = { keySpace: `${scope}:${scope === 'kind' ? kind : queue}`, key };
  if (mode === 'ignore' || mode === 'replace' || mode === 'serial') return { ...fields, keyMode: mode };
  const period = (field: string, value: unknown): number => {
    const ms = parseDuration(value);
    return ms !== undefined && ms >= 1 && ms <= MAX_DELAY_MS
      ? ms
      : refuse(field, value, `a duration from 1 ms to 10 years (${DURATION_SYNTAX})`);
  };
  const known = typeof mode === 'object' && mode !== null ? Object.keys(mode).sort().join() : '';
  if (known === 'throttle') {
    return {
      ...fields,
      keyMode: 'throttle',
      keyPeriodMs: period('keyMode.throttle', (mode as { throttle: Duration }).throttle),
    };
  }
  if (known !== 'debounce' && known !== 'debounce,maxWait') {
    return refuse(
      'keyMode',
      mode,
      "'ignore', 'replace', 'serial', { throttle: duration } or { debounce: duration, maxWait?: duration }",
    );
  }
  if (given.runAt !== undefined || given.delay !== undefined) {
    return refuse('keyMode', mode, "another mode when 'runAt' or 'delay' is given: debounce sets the time");
  }
  const { debounce, maxWait } = mode as { debounce: Duration; maxWait?: Duration };
  const keyPeriodMs = period('keyMode.debounce', debounce);
  return {
    ...fields,
    keyMode: 'debounce',
    keyPeriodMs,
    delayMs: keyPeriodMs,
    ...(maxWait === undefined ? {} : { keyMaxWaitMs: period('keyMode.maxWait', maxWait) }),
  };
}

function deadlineOf(
  given: Duration | 'off' | undefined,
  fallback: number | null,
  refuse: (value: unknown) => never,
): number | null {
  if (given === undefined) return fallback;
  if (given === 'off') return null;
  const ms = parseDuration(given);
  return ms !== undefined && ms >= 1 && ms <= MAX_DELAY_MS ? ms : refuse(given);
}

function whenOf(
  { runAt, delay }: EnqueueOptions,
  refuse: (field: string, value: unknown, must: string) => never,
): { runAt?: string; delayMs?: number } {
  if (runAt !== undefined && delay !== undefined) return refuse('delay', delay, "absent when 'runAt' is given");
  if (delay !== undefined) {
    const ms = parseDuration(delay);
    return ms !== undefined && ms <= MAX_DELAY_MS
      ? { delayMs: ms }
      : refuse('delay', delay, `a duration (${DURATION_SYNTAX}) of at most 10 years`);
  }
  if (runAt === undefined) return {};
  // Text without a zone means another moment on every machine.
  if (typeof runAt === 'string' && !/T.*(Z|[+-]\d\d(:?\d\d)?)$/.test(runAt)) {
    return refuse('runAt', runAt, "a Date, or ISO 8601 text with a zone such as '2030-01-31T08:00:00Z'");
  }
  const date = new Date(runAt);
  const year = date.getUTCFullYear();
  return Number.isNaN(date.getTime()) || year < 1970 || year > 9999
    ? refuse('runAt', runAt, 'a moment in the years 1970 to 9999, as a Date or as ISO 8601 text with a zone')
    : { runAt: date.toISOString() };
}

function encodePayload(payload: unknown, maxBytes: number, what: string): string {
  let json: string | undefined;
  try {
    json = JSON.stringify(payload ?? null);
  } catch (error) {
    throw new InvalidJobError(
      `${what}: the payload cannot be written as JSON: ${(error as Error).message}`,
      'payload',
      { cause: error },
    );
  }
  if (json === undefined)
    throw new InvalidJobError(`${what}: the payload is a ${typeof payload}, which JSON does not know`, 'payload');
  const bytes = Buffer.byteLength(json);
  if (bytes > maxBytes) {
    throw new InvalidJobError(
      `${what}: the payload has ${bytes} bytes of JSON, more than payloadMaxBytes = ${maxBytes}; store it elsewhere and enqueue a reference`,
      'payload',
    );
  }
  if (holdsUnstorable(json)) {
    throw new InvalidJobError(
      `${what}: the payload holds a NUL character or a lone surrogate, which PostgreSQL cannot store`,
      'payload',
    );
  }
  return json;
}

function describe(value: unknown): string {
  if (value instanceof Date) return Number.isNaN(value.getTime()) ? 'Invalid Date' : value.toISOString();
  try {
    return (JSON.stringify(value) ?? String(value)).slice(0, 100);
  } catch {
    return Object.prototype.toString.call(value);
  }
}
