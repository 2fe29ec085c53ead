import { hostname } from 'node:os';
import { Client } from 'pg';
import { InvalidOptionError, MAX_DELAY_MS } from '../errors';
import { Schema } from '../storage/schema';
import type {
  BackoffFunction,
  BudgetOptions,
  HandlerOptions,
  LeaseOptions,
  ResolvedBackoff,
  ResolvedBudget,
  ResolvedOptions,
} from './lease-options';
import {
  type Validator,
  boolean,
  duration,
  durationOr,
  integer,
  knownKeys,
  listOf,
  name,
  object,
  oneOf,
  refuse,
} from './validators';

const HOUR = 3_600_000;
const INT_MAX = 2_147_483_647;

const BUDGET_KEYS = ['maxAttempts', 'maxCrashes', 'maxReleases', 'maxSnoozes', 'backoff', 'deadline'] as const;
const HANDLER_KEYS = [
  ...BUDGET_KEYS,
  'queue',
  'concurrency',
  'fleetConcurrency',
  'concurrencyPerKey',
  'priority',
  'onLost',
] as const;
const TOP_KEYS = [
  ...BUDGET_KEYS,
  'name',
  'role',
  'connection',
  'schema',
  'migrate',
  'workerName',
  'queues',
  'store',
  'lease',
  'rescue',
  'leader',
  'concurrency',
  'queueConcurrency',
  'buffer',
  'claim',
  'suspects',
  'payloadMaxBytes',
  'resultMaxBytes',
  'checkpointMaxBytes',
  'maxExtension',
  'retention',
  'shutdown',
  'wakeUp',
  'poll',
  'handlers',
] as const;

const BUILT_IN: ResolvedBudget = {
  maxAttempts: 20,
  maxCrashes: 3,
  maxReleases: 20,
  maxSnoozes: 1000,
  backoff: { baseMs: 1000, maxMs: 24 * HOUR },
  deadlineMs: 300_000,
};

/** Reads options section by section; every reader names the option's full path in its error. */
class Section {
  constructor(
    private readonly values: Record<string, unknown>,
    private readonly path: string,
    known: readonly string[],
  ) {
    knownKeys(values, path, known);
  }

  at(key: string): string {
    return this.path === '' ? key : `${this.path}.${key}`;
  }

  get<T>(key: string, validator: Validator<T>, fallback: T): T {
    const value = this.values[key];
    return value === undefined ? fallback : validator(value, this.at(key));
  }

  section(key: string, known: readonly string[]): Section {
    return new Section(this.get(key, object, {}), this.at(key), known);
  }
}

/**
 * Validates what `forRoot` was given and fills in the defaults of DESIGN §6. A wrong option is an InvalidOptionError that names it,
 * its value and what is allowed.
 */
export function resolveOptions(given: LeaseOptions, calledAt = 'unknown'): ResolvedOptions {
  const top = new Section(objectUnshown(given, 'The options', '{ connection: { url } }'), '', TOP_KEYS);
  const leaseSection = top.section('lease', ['ttl', 'beat', 'maxBlocked']);
  const ttlMs = leaseSection.get('ttl', duration(300, 24 * HOUR), 30_000);
  const beatMs = leaseSection.get('beat', duration(50, 8 * HOUR), Math.floor(ttlMs / 3));
  if (beatMs * 3 > ttlMs) {
    throw new InvalidOptionError(
      `lease.ttl = ${ttlMs} ms is under three beats of lease.beat = ${beatMs} ms: one lost beat would cost the lease. ` +
        `Raise lease.ttl to at least ${beatMs * 3} ms or lower lease.beat to at most ${Math.floor(ttlMs / 3)} ms`,
    );
  }
  const rescue = top.section('rescue', [
    'session',
    'lease',
    'deadline',
    'every',
    'sessionEvery',
    'sessionGrace',
    'batch',
  ]);
  const leader = top.section('leader', ['probe', 'retry']);
  const buffer = top.section('buffer', ['max', 'age']);
  const shutdown = top.section('shutdown', ['timeout', 'grace']);
  const claim = top.section('claim', ['maxBytes']);
  const suspects = top.section('suspects', ['patience']);
  const retention = top.section('retention', ['completed', 'failed', 'cancelled']);
  const concurrency = top.get('concurrency', integer(1, 100_000), 50);
  const schema = given.schema ?? 'leasehold';
  Schema.assertValid(schema);
  const queueConcurrency = top.get('queueConcurrency', object, {});
  for (const [queue, limit] of Object.entries(queueConcurrency)) {
    integer(1, 100_000)(limit, `queueConcurrency['${queue}']`);
  }
  const handlers = top.get('handlers', object, {});
  for (const [kind, options] of Object.entries(handlers)) validateHandlerOptions(options, `handlers['${kind}']`);

  return {
    name: top.get('name', name(50), 'default'),
    role: top.get('role', oneOf('worker', 'producer', 'both'), 'both'),
    connection: resolveConnection(given.connection, concurrency),
    schema,
    migrate: top.get('migrate', boolean, false),
    workerName: top.get('workerName', name(100), hostname() || 'worker'),
    queues: top.get<string[] | null>('queues', listOf(name()), null),
    store: top.get('store', oneOf('shared', 'exclusive'), 'shared'),
    lease: {
      ttlMs,
      beatMs,
      maxBlockedMs: leaseSection.get('maxBlocked', duration(ttlMs, 24 * HOUR), Math.max(300_000, ttlMs)),
    },
    rescue: {
      session: rescue.get('session', boolean, true),
      lease: rescue.get('lease', boolean, true),
      deadline: rescue.get('deadline', boolean, true),
      everyMs: rescue.get('every', duration(50, HOUR), 5000),
      sessionEveryMs: rescue.get('sessionEvery', duration(50, HOUR), 500),
      sessionGraceMs: rescue.get('sessionGrace', duration(0, HOUR), 2500),
      batch: rescue.get('batch', integer(1, 500), 500),
    },
    leader: {
      probeMs: leader.get('probe', duration(50, HOUR), 2000),
      retryMs: leader.get('retry', duration(50, HOUR), 1000),
    },
    concurrency,
    queueConcurrency: queueConcurrency as Record<string, number>,
    buffer: { max: buffer.get('max', integer(0, 100_000), 1000), ageMs: buffer.get('age', duration(50, HOUR), 1000) },
    claim: { maxBytes: claim.get('maxBytes', integer(1, 256 * 1024 * 1024), 16 * 1024 * 1024) },
    suspects: { patienceMs: suspects.get('patience', duration(0, 24 * HOUR), 30_000) },
    payloadMaxBytes: top.get('payloadMaxBytes', integer(1, 64 * 1024 * 1024), 1024 * 1024),
    resultMaxBytes: top.get('resultMaxBytes', integer(1, 64 * 1024 * 1024), 1024 * 1024),
    checkpointMaxBytes: top.get('checkpointMaxBytes', integer(1, 64 * 1024 * 1024), 1024 * 1024),
    maxExtensionMs: top.get('maxExtension', duration(1000, MAX_DELAY_MS), 24 * HOUR),
    retention: {
      completedMs: retention.get('completed', durationOr('forever', 0, MAX_DELAY_MS), 7 * 24 * HOUR),
      failedMs: retention.get('failed', durationOr('forever', 0, MAX_DELAY_MS), 30 * 24 * HOUR),
      cancelledMs: retention.get('cancelled', durationOr('forever', 0, MAX_DELAY_MS), 7 * 24 * HOUR),
    },
    shutdown: {
      timeoutMs: shutdown.get('timeout', duration(0, 24 * HOUR), 20_000),
      graceMs: shutdown.get('grace', duration(0, 24 * HOUR), 5000),
    },
    wakeUp: top.get('wakeUp', oneOf('notify', 'off'), 'notify'),
    pollMs: top.get('poll', duration(20, HOUR), 1000),
    budget: resolveBudget(given, '', BUILT_IN),
    handlers: handlers as Record<string, HandlerOptions>,
    calledAt,
  };
}

function resolveConnection(given: unknown, concurrency: number): ResolvedOptions['connection'] {
  const values = objectUnshown(given, 'connection', '{ url }') as unknown as LeaseOptions['connection'];
  const section = new Section(values as Record<string, unknown>, 'connection', [
    'url',
    'dataSource',
    'options',
    'directUrl',
    'poolMax',
    'queryTimeout',
  ]);
  const sources = (['url', 'dataSource', 'options'] as const).filter((key) => values[key] !== undefined);
  if (sources.length !== 1) {
    throw new InvalidOptionError(
      `connection must have exactly one of 'url', 'dataSource' and 'options'; it has ${sources.length === 0 ? 'none' : sources.join(', ')}`,
    );
  }
  for (const key of ['url', 'directUrl'] as const)
    if (values[key] !== undefined) assertUrl(values[key], `connection.${key}`);
  if (values.options !== undefined) objectUnshown(values.options, 'connection.options', '{ host, user, … }');
  if (values.dataSource !== undefined) {
    const { options } = objectUnshown(values.dataSource, 'connection.dataSource', 'a TypeORM DataSource');
    const { type } = objectUnshown(options, 'connection.dataSource.options', "a TypeORM DataSource's");
    if (type !== 'postgres') refuse('connection.dataSource', type, "a DataSource of type 'postgres'");
  }
  return {
    ...values,
    poolMax: section.get('poolMax', integer(2, 500), Math.min(10, Math.max(3, Math.ceil(concurrency / 25) + 2))),
    queryTimeoutMs: section.get('queryTimeout', duration(100, HOUR), 10_000),
  };
}

/** As `object`, for what may hold a password: the value is never shown. */
function objectUnshown(value: unknown, path: string, such: string): Record<string, unknown> {
  if (typeof value === 'object' && value !== null && !Array.isArray(value)) return value as Record<string, unknown>;
  throw new InvalidOptionError(
    `${path} must be an object such as ${such}, not ${value === null ? 'null' : typeof value}`,
  );
}

/** The value is never shown, nor an error that may quote it. */
function assertUrl(url: unknown, path: string): void {
  if (typeof url !== 'string' || !/^postgres(ql)?:\/\//.test(url)) {
    throw new InvalidOptionError(`${path} must begin with postgres:// or postgresql://`);
  }
  try {
    new Client({ connectionString: url });
  } catch (error) {
    const { code = 'no code' } = error as { code?: string };
    throw new InvalidOptionError(
      `${path} cannot be read (${code}): it must look like postgres://user:password@host:5432/database`,
    );
  }
}

/** Checks a kind's options and nothing else; `path` says where they stand. */
export function validateHandlerOptions(given: unknown, path: string): HandlerOptions {
  const section = new Section(object(given, path), path, HANDLER_KEYS);
  section.get('queue', name(), 'default');
  section.get('concurrency', integer(1, 100_000), 10);
  section.get('fleetConcurrency', integer(1, 1_000_000), 1);
  section.get('concurrencyPerKey', integer(1, 1_000_000), 1);
  section.get('priority', integer(-32_768, 32_767), 0);
  section.get('onLost', oneOf('refund', 'charge'), 'refund');
  resolveBudget(given as HandlerOptions, path, BUILT_IN, true);
  return given as HandlerOptions;
}

/** A level's budgets, falling back on the level below. Only a kind's backoff may be a function. */
export function resolveBudget(
  given: BudgetOptions | HandlerOptions,
  path: string,
  below: ResolvedBudget,
  mayBeFunction = false,
): ResolvedBudget {
  const values = Object.fromEntries(BUDGET_KEYS.map((key) => [key, given[key]]));
  const section = new Section(values, path, BUDGET_KEYS);
  return {
    maxAttempts: section.get('maxAttempts', integer(1, INT_MAX), below.maxAttempts),
    maxCrashes: section.get('maxCrashes', integer(1, INT_MAX), below.maxCrashes),
    maxReleases: section.get('maxReleases', integer(0, INT_MAX), below.maxReleases),
    maxSnoozes: section.get('maxSnoozes', integer(0, INT_MAX), below.maxSnoozes),
    backoff: resolveBackoff(section, given.backoff, below.backoff, mayBeFunction),
    deadlineMs: section.get('deadline', durationOr('off', 1, MAX_DELAY_MS), below.deadlineMs),
  };
}

/** A job's own backoff. @throws InvalidOptionError */
export const resolveBackoffOption = (given: unknown, below: ResolvedBackoff): ResolvedBackoff =>
  resolveBackoff(new Section({ backoff: given }, '', ['backoff']), given, below, false);

function resolveBackoff(
  section: Section,
  given: unknown,
  below: ResolvedBackoff,
  mayBeFunction: boolean,
): ResolvedBackoff {
  if (typeof given === 'function') {
    if (!mayBeFunction) {
      throw new InvalidOptionError(
        `${section.at('backoff')} is a function, which only a kind may have: @JobHandler(kind, { backoff: (attempt, error) => … })`,
      );
    }
    return { ...below, of: given as BackoffFunction };
  }
  if (typeof given === 'number' || typeof given === 'string') {
    const ms = section.get('backoff', duration(0, MAX_DELAY_MS), 0);
    return { baseMs: ms, maxMs: ms };
  }
  const backoff = section.section('backoff', ['base', 'max']);
  const baseMs = backoff.get('base', duration(0, MAX_DELAY_MS), below.baseMs);
  const maxMs = backoff.get('max', duration(0, MAX_DELAY_MS), Math.max(below.maxMs, baseMs));
  if (maxMs < baseMs) {
    throw new InvalidOptionError(`${backoff.at('max')} = ${maxMs} ms is below ${backoff.at('base')} = ${baseMs} ms`);
  }
  return { baseMs, maxMs };
}
