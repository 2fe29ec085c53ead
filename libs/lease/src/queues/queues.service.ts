import { Injectable } from '@nestjs/common';
import { WakeUp } from '../claim/wake-up';
import { InvalidOptionError, MAX_DELAY_MS } from '../errors';
import type { Duration } from '../options/duration';
import type { RetentionOptions } from '../options/lease-options';
import { durationOr, duration, integer, isName, knownKeys, object } from '../options/validators';
import { Database } from '../storage/database';
import { configureQueueSql, countRunningSql, pauseQueueSql, queueSql, queuesSql } from './queues.sql';

/** What a queue can have of its own, for the whole fleet. null takes a setting away; what is left out stays as it is. */
export interface QueueSettings {
  /** Jobs of the queue that run at once in the whole fleet. */
  maxRunning?: number | null;
  /** At most `limit` jobs start in any `per`, in the whole fleet; a bucket that is full after a rest of that long. */
  rate?: { limit: number; per: Duration } | null;
  /** Share of a worker's free slots beside other queues, 1 to 1000. With it queues share by weight, and only within a queue by priority. */
  weight?: number | null;
  /** A job that has been ready for so long rises by one priority, at most to 0, so that lower ones are not starved. */
  ageing?: Duration | null;
  /** Deadline of jobs that neither they nor their kind give one; 'off' = none. */
  deadline?: Duration | 'off' | null;
  /** How long its finished jobs are kept, instead of the module's. */
  retention?: { [K in keyof RetentionOptions]: RetentionOptions[K] | null };
}

/** A queue that is paused or has settings. Durations in ms; null: not set; of `keep…Ms` -1 = for ever, of `deadlineMs` 0 = none. */
export interface QueueInfo {
  name: string;
  paused: boolean;
  maxRunning: number | null;
  rateLimit: number | null;
  rateMs: number | null;
  weight: number | null;
  ageingMs: number | null;
  deadlineMs: number | null;
  keepCompletedMs: number | null;
  keepFailedMs: number | null;
  keepCancelledMs: number | null;
}

const MS_FIELDS = ['rateMs', 'ageingMs', 'deadlineMs', 'keepCompletedMs', 'keepFailedMs', 'keepCancelledMs'] as const;

/** Pauses and configures whole queues, for the fleet. The settings stand in the database: they hold for every process and survive restarts. */
@Injectable()
export class QueuesService {
  constructor(
    private readonly database: Database,
    private readonly wakeUp: WakeUp,
  ) {}

  /** No job of the queue is started any more; those that were claimed before go on. @returns false if it was paused already */
  pause(queue: string): Promise<boolean> {
    return this.setPaused(queue, true);
  }

  /** @returns false if it was not paused */
  async resume(queue: string): Promise<boolean> {
    const changed = await this.setPaused(queue, false);
    if (changed) this.wakeUp.notify([]);
    return changed;
  }

  /** @throws InvalidOptionError naming the setting */
  async configure(queue: string, settings: QueueSettings): Promise<void> {
    assertQueue(queue);
    const columns = columnsOf(settings, `queue '${queue}'`);
    await this.database.query(configureQueueSql(this.s, Object.keys(columns)), [queue, ...Object.values(columns)]);
    // What runs already counts.
    if (columns.max_running != null) await this.database.query(countRunningSql(this.s), [queue]);
    this.wakeUp.notify([]);
  }

  /** Queues that are paused or have settings; others have none of either. */
  async list(): Promise<QueueInfo[]> {
    return (await this.database.query<Row>(queuesSql(this.s))).map(infoOf);
  }

  async get(queue: string): Promise<QueueInfo> {
    assertQueue(queue);
    const [row] = await this.database.query<Row>(queueSql(this.s), [queue]);
    return row ? infoOf(row) : { ...NOTHING, name: queue };
  }

  private async setPaused(queue: string, paused: boolean): Promise<boolean> {
    assertQueue(queue);
    if (!paused && !(await this.get(queue)).paused) return false;
    return (await this.database.query(pauseQueueSql(this.s), [queue, paused])).length > 0;
  }

  private get s(): string {
    return this.database.schema.quoted;
  }
}

type Row = Record<string, unknown> & QueueInfo;

const NOTHING: QueueInfo = {
  name: '',
  paused: false,
  maxRunning: null,
  rateLimit: null,
  rateMs: null,
  weight: null,
  ageingMs: null,
  deadlineMs: null,
  keepCompletedMs: null,
  keepFailedMs: null,
  keepCancelledMs: null,
};

const infoOf = (row: Row): QueueInfo => {
  const info = { ...row };
  for (const field of MS_FIELDS) info[field] = row[field] === null ? null : Number(row[field]);
  return info;
};

function assertQueue(queue: unknown): void {
  if (!isName(queue)) {
    throw new InvalidOptionError(
      `queue = ${JSON.stringify(queue)} must be text of 1 to 200 bytes without NUL or lone surrogates`,
    );
  }
}

/** The settings given as columns and values. */
function columnsOf(settings: QueueSettings, what: string): Record<string, number | null> {
  const given = object(settings, what);
  knownKeys(given, what, ['maxRunning', 'rate', 'weight', 'ageing', 'deadline', 'retention']);
  const columns: Record<string, number | null> = {};
  const set = (column: string, value: unknown, read: (value: unknown) => number | null): void => {
    if (value !== undefined) columns[column] = value === null ? null : read(value);
  };
  set('max_running', given.maxRunning, (value) => integer(0, 1_000_000)(value, `${what}.maxRunning`));
  set('weight', given.weight, (value) => integer(1, 1000)(value, `${what}.weight`));
  set('ageing_ms', given.ageing, (value) => duration(1000, MAX_DELAY_MS)(value, `${what}.ageing`));
  set('deadline_ms', given.deadline, (value) => durationOr('off', 1, MAX_DELAY_MS)(value, `${what}.deadline`) ?? 0);
  if (given.rate !== undefined) {
    const rate = given.rate === null ? undefined : object(given.rate, `${what}.rate`);
    if (rate) knownKeys(rate, `${what}.rate`, ['limit', 'per']);
    columns.rate_limit = rate ? integer(1, 1_000_000)(rate.limit, `${what}.rate.limit`) : null;
    columns.rate_ms = rate ? duration(1, 86_400_000)(rate.per, `${what}.rate.per`) : null;
    columns.bucket = null;
    columns.bucket_at = null;
  }
  if (given.retention !== undefined) {
    const retention = object(given.retention, `${what}.retention`);
    knownKeys(retention, `${what}.retention`, ['completed', 'failed', 'cancelled']);
    for (const state of ['completed', 'failed', 'cancelled']) {
      set(
        `keep_${state}_ms`,
        retention[state],
        (value) => durationOr('forever', 0, MAX_DELAY_MS)(value, `${what}.retention.${state}`) ?? -1,
      );
    }
  }
  return columns;
}
