import type { ClientBase } from 'pg';
import type { EntityManager, QueryRunner } from 'typeorm';
import { InvalidJobError, MAX_DELAY_MS } from '../errors';
import type { HandlerDefinition } from '../handlers/handler-registry';
import { validatePayload } from '../handlers/validate-payload';
import { DURATION_SYNTAX, type Duration, parseDuration } from '../options/duration';
import type { ResolvedOptions } from '../options/lease-options';
import { isName } from '../options/validators';
import { didYouMean } from '../options/suggest';
import { holdsUnstorable } from '../settle/encode-result';

/** The caller's own transaction: the jobs are visible at its commit and gone at its rollback. At most one of these. */
export interface EnqueueTransaction {
  /** The manager that TypeORM hands to `dataSource.transaction(…)`. */
  manager?: EntityManager;
  /** A TypeORM query runner with an open transaction. */
  queryRunner?: QueryRunner;
  /** A `pg` client with an open transaction. */
  client?: ClientBase;
}

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
  /** At most 20 of at most 100 bytes. */
  tags?: string[];
}

export const TRANSACTION_KEYS = ['manager', 'queryRunner', 'client'] as const;

const OPTION_KEYS: string[] = [
  'runAt',
  'delay',
  'priority',
  'queue',
  'maxAttempts',
  'maxCrashes',
  'deadline',
  'tags',
  ...TRANSACTION_KEYS,
];
const INT_MAX = 2_147_483_647;

/** All of a job but its payload, checked: the beginning of its group's JSON for `enqueue_v1`, and the lane to announce. */
export interface PreparedHead {
  json: string;
  queue: string;
  kind: string;
  definition: HandlerDefinition | undefined;
}

/** One job, checked and ready to be sent. */
export interface PreparedJob {
  head: PreparedHead;
  /** The payload's JSON. */
  payload: string;
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
    field: 'priority' | 'maxAttempts' | 'maxCrashes',
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
    deadlineMs: deadlineOf(given.deadline, budget.deadlineMs, (value) =>
      invalid('deadline', value, `'off' or a duration of at least 1 ms (${DURATION_SYNTAX})`),
    ),
    deadlineFrom: given.deadline === undefined && !definition?.ownDeadline ? 'module' : 'job',
    ...(budget.backoff.baseMs === 1000 && budget.backoff.maxMs === 86_400_000 ? {} : { backoff: budget.backoff }),
    ...(tags.length > 0 ? { tags } : {}),
    ...whenOf(given, invalid),
  };
  return { json: JSON.stringify(fields).slice(0, -1), queue, kind, definition };
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
