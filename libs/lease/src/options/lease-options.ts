import type { PoolConfig } from 'pg';
import type { DataSource } from 'typeorm';
import type { Duration } from './duration';

/** Delays of retries: exponential with full jitter, from `base` doubling up to `max`. Computed in the database (R25). */
export interface BackoffOptions {
  /** The shortest delay. Default 1 s. */
  base?: Duration;
  /** The longest delay. Default 24 h. */
  max?: Duration;
}

/**
 * The delay before the next attempt, from the number of the one that failed (1 = the first) and what it threw. undefined, or anything that is no
 * duration, or an error of its own: the exponential default. Not asked when nobody reported an error (a passed deadline).
 */
export type BackoffFunction = (attempt: number, error: unknown) => Duration | undefined;

/** Budgets that a kind, a job or the whole module can set; job over kind over module. */
export interface BudgetOptions {
  /** Runs whose failure the handler reports, or whose deadline passes. 1 = no retry. Default 20. */
  maxAttempts?: number;
  /** Times that a job's worker may die under it before the job is failed. Default 3. 1 = always run alone. */
  maxCrashes?: number;
  /** Times that a drain may give the job back. Default 20. */
  maxReleases?: number;
  /** Times that a job may ask for later (`lease.snooze`). Default 1000. */
  maxSnoozes?: number;
  /** `{ base, max }`: exponential with full jitter; a duration: always that. Default 1 s … 24 h. */
  backoff?: BackoffOptions | Duration;
  /** How long one run may take; 'off' = for ever, and not in the deadline scan. Default 5 m. */
  deadline?: Duration | 'off';
}

/** What a kind can set, in `@JobHandler` or in the module's `handlers`, which wins. */
export interface HandlerOptions extends Omit<BudgetOptions, 'backoff'> {
  /** As the module's, or a function of the attempt and the error. */
  backoff?: BackoffOptions | Duration | BackoffFunction;
  /** What a lost lease (killed, frozen or cut-off worker) costs beside a crash: 'refund' (default) gives the attempt back, 'charge' spends it. */
  onLost?: 'refund' | 'charge';
  /** Queue that jobs of this kind go to unless the enqueue names another. Default 'default'. */
  queue?: string;
  /** Jobs of this kind that one process runs at once. Default 10. */
  concurrency?: number;
  /** Jobs of this kind that run at once in the whole fleet. Default: no limit. Each worker keeps to its own code's number. */
  fleetConcurrency?: number;
  /** With a concurrencyKey: jobs of the same key that run at once in the whole fleet. Default 1. */
  concurrencyPerKey?: number;
  /** Default priority, -32768 to 32767, lower runs first. Default 0. */
  priority?: number;
}

/** How long finished jobs are kept, counted from when they finished. */
export interface RetentionOptions {
  /** Default 7 d. */
  completed?: Duration | 'forever';
  /** Default 30 d. */
  failed?: Duration | 'forever';
  /** Default 7 d. */
  cancelled?: Duration | 'forever';
}

export interface ConnectionOptions {
  /** `postgres://…`. One of `url`, `dataSource` and `options` is needed. */
  url?: string;
  /** A TypeORM DataSource (initialized or not) whose connection settings are used. Its pool is left alone. */
  dataSource?: DataSource;
  /** Settings for `pg`. */
  options?: PoolConfig;
  /** Where session locks work, if the connection above goes through a transaction-mode pooler such as PgBouncer. */
  directUrl?: string;
  /** Connections in our own pool. Default: from `concurrency`, 3 to 10. Two more are held: the beat's and the leader's. */
  poolMax?: number;
  /** Client-side limit of one query; after it the connection is destroyed. Default 10 s. */
  queryTimeout?: Duration;
}

export interface LeaseOptions extends BudgetOptions {
  /** Instance name, for applications that use two databases. Default 'default'. */
  name?: string;
  /** 'worker' runs handlers, 'producer' only enqueues, 'both' (default) does both. */
  role?: 'worker' | 'producer' | 'both';
  connection: ConnectionOptions;
  /** PostgreSQL schema of all tables. Default 'leasehold'. */
  schema?: string;
  /** Create or update the schema at boot. Default false: a missing or older schema is a boot error. */
  migrate?: boolean;
  /** First part of the worker's id, and its name in the registry. Default: the host's name. */
  workerName?: string;
  /** Queues that this process serves. Default: all. */
  queues?: string[];
  /** 'exclusive' proves at boot that no other worker is up and re-queues every lease at once (R14). Default 'shared'. */
  store?: 'shared' | 'exclusive';
  lease?: {
    /** A worker that was silent for this long is dead. Default 30 s. */
    ttl?: Duration;
    /** Renewal interval. Default ttl / 3; a ttl under three beats is refused. */
    beat?: Duration;
    /** A process whose event loop is blocked for longer is not renewed any more. Default 5 m. */
    maxBlocked?: Duration;
  };
  rescue?: {
    /** Way 1: the worker's session lock is gone. Default on. */
    session?: boolean;
    /** Way 2: the worker's lease has expired. Default on. */
    lease?: boolean;
    /** Way 3: the job's deadline has passed. Default on. */
    deadline?: boolean;
    /** Interval of ways 2 and 3. Default 5 s. */
    every?: Duration;
    /** Interval of way 1's looks. Default 500 ms. */
    sessionEvery?: Duration;
    /** How far apart way 1's two looks must be at least. Default 2.5 s: a connection that was cut for 2 s is back by then. */
    sessionGrace?: Duration;
    /** Leases moved by one statement. Default 500. */
    batch?: number;
  };
  leader?: {
    /** How often the leader probes its session. Default 2 s. A leader that cannot is none after three probes. */
    probe?: Duration;
    /** How often the others try to become leader. Default 1 s. */
    retry?: Duration;
  };
  /** Jobs that this process runs at once, over all kinds. Default 50. */
  concurrency?: number;
  /** Jobs of a queue that this process runs at once, by the queue's name. Default: no limit of its own. */
  queueConcurrency?: Record<string, number>;
  buffer?: {
    /** Jobs claimed ahead of a free slot, at most. 0 = none. Default 1000. */
    max?: number;
    /** What has not started after this long is given back. Default 1 s. */
    age?: Duration;
  };
  claim?: {
    /** Bytes of payload that one claim may bring. Default 16 MiB. */
    maxBytes?: number;
  };
  suspects?: {
    /** How long a job that must run alone may wait before this worker empties itself for it. Default 30 s. */
    patience?: Duration;
  };
  /** Default 1 MiB. */
  payloadMaxBytes?: number;
  /** Default 1 MiB. */
  resultMaxBytes?: number;
  /** Of one checkpoint's JSON. Default 1 MiB. */
  checkpointMaxBytes?: number;
  /** A deadline that `lease.extend` moves is never further than this from the claim. Default 24 h. */
  maxExtension?: Duration;
  /** How long finished jobs are kept; a queue's own settings win. */
  retention?: RetentionOptions;
  shutdown?: {
    /** How long a drain lets handlers finish before it aborts them. Default 20 s. */
    timeout?: Duration;
    /** How long an aborted handler may take to end before the drain goes on without it. Default 5 s. */
    grace?: Duration;
  };
  /** How workers hear of new jobs at once; the poll finds them in any case. Default 'notify'. */
  wakeUp?: 'notify' | 'off';
  /** Interval of the poll. Default 1 s. */
  poll?: Duration;
  /** Options of kinds, for those that come from configuration. They win over the decorator's. */
  handlers?: Record<string, HandlerOptions>;
}

/** `of`: the kind's own function, whose answer outranks the numbers. */
export interface ResolvedBackoff {
  baseMs: number;
  maxMs: number;
  of?: BackoffFunction;
}

/** Durations in ms, sizes in bytes, `deadlineMs` null = none. */
export interface ResolvedBudget {
  maxAttempts: number;
  maxCrashes: number;
  maxReleases: number;
  maxSnoozes: number;
  backoff: ResolvedBackoff;
  deadlineMs: number | null;
}

/** Options as the services see them: validated, complete, durations in ms. A class, so that it can be injected by type. */
export abstract class ResolvedOptions {
  readonly name: string;
  readonly role: 'worker' | 'producer' | 'both';
  readonly connection: ConnectionOptions & { poolMax: number; queryTimeoutMs: number };
  readonly schema: string;
  readonly migrate: boolean;
  readonly workerName: string;
  readonly queues: string[] | null;
  readonly store: 'shared' | 'exclusive';
  readonly lease: { ttlMs: number; beatMs: number; maxBlockedMs: number };
  readonly rescue: {
    session: boolean;
    lease: boolean;
    deadline: boolean;
    everyMs: number;
    sessionEveryMs: number;
    sessionGraceMs: number;
    batch: number;
  };
  readonly leader: { probeMs: number; retryMs: number };
  readonly concurrency: number;
  readonly queueConcurrency: Readonly<Record<string, number>>;
  readonly buffer: { max: number; ageMs: number };
  readonly claim: { maxBytes: number };
  readonly suspects: { patienceMs: number };
  readonly payloadMaxBytes: number;
  readonly resultMaxBytes: number;
  readonly checkpointMaxBytes: number;
  readonly maxExtensionMs: number;
  /** In ms; null: for ever. */
  readonly retention: { completedMs: number | null; failedMs: number | null; cancelledMs: number | null };
  readonly shutdown: { timeoutMs: number; graceMs: number };
  readonly wakeUp: 'notify' | 'off';
  readonly pollMs: number;
  readonly budget: ResolvedBudget;
  readonly handlers: Record<string, HandlerOptions>;
  /** Where `forRoot` was called, for the message about a second one. */
  readonly calledAt: string;
}
