import { Injectable } from '@nestjs/common';
import { InvalidJobError, UnknownJobError } from '../errors';
import type { HandlerClass, PayloadOf, ResultOf } from '../handlers/handler.types';
import { Database } from '../storage/database';
import { assertId, filterOf } from './job-filter';
import { JOB_STATES, type JobLogLine, type JobRun, type JobSaved, type JobState, type JobStatus } from './job.types';
import type { FindJobs, JobPage } from './job-filter';
import { countsSql, findSql, getSql, runsSql, savedSql, unhandledSql } from './jobs.sql';

/** Says what has become of jobs. */
@Injectable()
export class JobReader {
  constructor(private readonly database: Database) {}

  async get<H extends HandlerClass = HandlerClass>(id: string): Promise<JobStatus<PayloadOf<H>, ResultOf<H>>> {
    assertId(id, 'id');
    const [row] = await this.database.query<JobStatus<PayloadOf<H>, ResultOf<H>> & Record<string, unknown>>(
      getSql(this.s),
      [id],
    );
    if (!row) throw new UnknownJobError(id);
    const [runs, [saved]] = await Promise.all([
      this.database.query<JobRun & Record<string, unknown>>(runsSql(this.s), [id]),
      this.database.query<SavedRow>(savedSql(this.s), [id]),
    ]);
    return { ...row, runs, saved: saved ? { ...saved, log: saved.log.map(logLine) } : null };
  }

  async find(filter: FindJobs): Promise<JobPage> {
    const { limit = 50, after } = filter;
    if (!Number.isInteger(limit) || limit < 1 || limit > 1000) {
      throw new InvalidJobError(`limit = ${limit} must be a whole number from 1 to 1000`, 'limit');
    }
    if (after !== undefined) assertId(after, 'after');
    const { state, kind, queue, tag, batchId } = filterOf(filter);
    const jobs = await this.database.query<JobStatus & Record<string, unknown>>(findSql(this.s, state), [
      after ?? null,
      kind,
      queue,
      tag,
      limit + 1,
      batchId,
    ]);
    const page = jobs.slice(0, limit);
    return { jobs: page, next: jobs.length > limit ? (page.at(-1)?.id ?? null) : null };
  }

  async counts(): Promise<Record<JobState, number>> {
    const rows = await this.database.query<{ state: JobState; count: number }>(countsSql(this.s));
    const counts = Object.fromEntries(JOB_STATES.map((state) => [state, 0])) as Record<JobState, number>;
    for (const { state, count } of rows) counts[state] += count;
    return counts;
  }

  async unhandledKinds(): Promise<string[]> {
    return (await this.database.query<{ kind: string }>(unhandledSql(this.s))).map(({ kind }) => kind);
  }

  private get s(): string {
    return this.database.schema.quoted;
  }
}

type SavedRow = Omit<JobSaved, 'log'> & { log: [string, number, string][] } & Record<string, unknown>;

const logLine = ([at, attempt, line]: [string, number, string]): JobLogLine => ({ at: new Date(at), attempt, line });
