import type { TestDatabase } from './test-database';

const S = '"leasehold"';

/** Which finished jobs to make. */
export interface FinishedJobs {
  count?: number;
  state?: 'completed' | 'failed' | 'cancelled';
  queue?: string;
  /** How long ago they finished, an hour after they were made; as PostgreSQL reads an interval. */
  age?: string;
  /** With a run and a checkpoint each. */
  history?: boolean;
}

/** Finished jobs as time would have left them, in the partition of their day. @returns their ids */
export async function finishedJobs(
  db: TestDatabase,
  { count = 1, state = 'completed', queue = 'default', age = '0', history = false }: FinishedJobs = {},
): Promise<string[]> {
  const { days } = await db.one<{ days: number }>(
    `SELECT (clock_timestamp() AT TIME ZONE 'UTC')::date - ((clock_timestamp() - $1::interval) AT TIME ZONE 'UTC')::date AS days`,
    [age],
  );
  await makeDay(db, days);
  const rows = await db.query<{ id: string }>(
    `WITH j AS (
       INSERT INTO ${S}.jobs (queue, kind, payload, priority, max_attempts, max_crashes, max_releases, created_at)
       SELECT $2, 'old', '1', 0, 20, 3, 20, clock_timestamp() - $3::interval - interval '1 h' FROM generate_series(1, $1) RETURNING id),
     f AS (
       INSERT INTO ${S}.finished (job_id, token, started_at, finished_at, attempt, crashes, releases, snoozes, priority, state, outcome, queue, kind)
       SELECT id, id, clock_timestamp() - $3::interval, clock_timestamp() - $3::interval, 1, 0, 0, 0, 0, $4, $4, $2, 'old' FROM j),
     r AS (
       INSERT INTO ${S}.runs (job_id, token, started_at, ended_at, attempt, outcome, worker_id)
       SELECT id, 1, now(), now(), 1, 'failed', 'w' FROM j WHERE $5),
     c AS (INSERT INTO ${S}.checkpoints (job_id, token, saved_at, checkpoint) SELECT id, 1, now(), '1' FROM j WHERE $5)
     SELECT id::text FROM j ORDER BY j.id`,
    [count, queue, age, state, history],
  );
  return rows.map(({ id }) => id);
}

/** The partition of `finished` for a UTC day so many days ago, if there is none yet. @returns its name, as `regclass` prints it */
export async function makeDay(db: TestDatabase, daysAgo: number): Promise<string> {
  const { name, from, to } = await db.one<{ name: string; from: string; to: string }>(
    `SELECT 'leasehold.finished_' || to_char(day, 'YYYYMMDD') AS name, day || ' 00:00+00' AS from, day + 1 || ' 00:00+00' AS to
     FROM (SELECT (clock_timestamp() AT TIME ZONE 'UTC')::date - $1::int AS day) d`,
    [daysAgo],
  );
  await db.query(
    `CREATE TABLE IF NOT EXISTS ${name} PARTITION OF ${S}.finished FOR VALUES FROM ('${from}') TO ('${to}')`,
  );
  return name;
}

/** The rows that there are about these jobs when they have finished. */
export const rowsAbout = (
  db: TestDatabase,
  ids: string[],
): Promise<{ jobs: number; finished: number; runs: number; checkpoints: number }> =>
  db.one(
    `SELECT (SELECT count(*)::int FROM ${S}.jobs WHERE id = ANY ($1)) AS jobs, (SELECT count(*)::int FROM ${S}.finished WHERE job_id = ANY ($1)) AS finished,
      (SELECT count(*)::int FROM ${S}.runs WHERE job_id = ANY ($1)) AS runs, (SELECT count(*)::int FROM ${S}.checkpoints WHERE job_id = ANY ($1)) AS checkpoints`,
    [ids],
  );

/** Those of the jobs that are still there, in the order of their ids. */
export const jobsLeft = async (db: TestDatabase, ids: string[]): Promise<string[]> =>
  (
    await db.query<{ id: string }>(`SELECT id::text FROM ${S}.jobs WHERE id = ANY ($1) ORDER BY ${S}.jobs.id`, [ids])
  ).map(({ id }) => id);
