import { randomBytes } from 'node:crypto';
import { basename } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import { Client, escapeIdentifier, escapeLiteral, Pool, type QueryResultRow } from 'pg';
import { onServer } from './on-server';

/** How to make the database of a spec. */
export interface TestDatabaseOptions {
  /** Part of the name; default the spec file's. */
  name?: string;
  /** Defaults of the database: `{ statement_timeout: '2s' }`. */
  settings?: Record<string, string>;
  /** Url of a role that may create databases, on another server than the run's. */
  adminUrl?: string;
}

/** A session that should have ended. */
export interface Session {
  pid: number;
  application_name: string;
  state: string | null;
  query: string;
  advisory_locks: string;
}

/** Client sessions in the databases `$1`, with the number of advisory locks that each holds. */
export const LEFT_SESSIONS = `
  SELECT a.pid, a.application_name, a.state, left(a.query, 300) AS query,
         (SELECT count(*) FROM pg_locks l WHERE l.pid = a.pid AND l.locktype = 'advisory') AS advisory_locks
  FROM pg_stat_activity a
  WHERE a.datname = ANY ($1) AND a.backend_type = 'client backend'
  ORDER BY a.backend_start`;

const LEAK_DEADLINE_MS = 2_000;
const LEAK_POLL_MS = 25;

/** Start of the names of this run's databases. */
export function databasePrefix(): string {
  return `lh_test_${process.env.LEASE_TEST_RUN ?? 'x'}_`;
}

export function describeSessions(sessions: Session[]): string {
  return sessions
    .map(
      ({ pid, application_name, state, query, advisory_locks }) =>
        `  pid ${pid} "${application_name}" ${state}, ${advisory_locks} advisory locks: ${query}`,
    )
    .join('\n');
}

/** The run's isolation is there to try our product with; the statements of the test itself are written for this one. */
const OWN_SETTINGS = '-c default_transaction_isolation=read\\ committed';

/** A database of its own for a spec file, on the server of the run. */
export class TestDatabase {
  private readonly pool: Pool;
  private readonly clients: Client[] = [];
  private dropping: Promise<void> | undefined;

  private constructor(
    readonly name: string,
    readonly url: string,
    private readonly adminUrl: string,
  ) {
    this.pool = new Pool({ connectionString: url, max: 4, application_name: 'lh_test', options: OWN_SETTINGS });
    this.pool.on('error', () => undefined);
  }

  static async create({ name, settings, adminUrl = runUrl() }: TestDatabaseOptions = {}): Promise<TestDatabase> {
    const label = (name ?? specName()).toLowerCase().replace(/[^a-z0-9]+/g, '_');
    const database = `${databasePrefix()}${label.slice(0, 32)}_${randomBytes(3).toString('hex')}`;
    const quoted = escapeIdentifier(database);
    await onServer(adminUrl, async (admin) => {
      await admin.query(`CREATE DATABASE ${quoted}`);
      for (const [setting, value] of Object.entries({ ...settingsOfRun(), ...settings })) {
        await admin.query(`ALTER DATABASE ${quoted} SET ${setting} = ${escapeLiteral(value)}`);
      }
    });
    const url = new URL(adminUrl);
    url.pathname = `/${database}`;
    return new TestDatabase(database, url.href, adminUrl);
  }

  /** Rows of a statement, on a pool of four sessions of the helper's own. */
  async query<R extends QueryResultRow = Record<string, unknown>>(sql: string, params?: unknown[]): Promise<R[]> {
    return (await this.pool.query<R>(sql, params)).rows;
  }

  /** The one row of a statement; throws when there is none, or more. */
  async one<R extends QueryResultRow = Record<string, unknown>>(sql: string, params?: unknown[]): Promise<R> {
    const [row, ...others] = await this.query<R>(sql, params);
    if (row === undefined || others.length > 0) throw new Error(`${row ? others.length + 1 : 0} rows, not 1: ${sql}`);
    return row;
  }

  /** A session of the spec's own, for gates and locks; ended by {@link drop} at the latest. */
  async client(applicationName = 'lh_test_client'): Promise<Client> {
    const client = new Client({ connectionString: this.url, application_name: applicationName, options: OWN_SETTINGS });
    client.on('error', () => undefined);
    await client.connect();
    this.clients.push(client);
    return client;
  }

  /** Time of the database, from a session of its own that a jam of the pool does not delay. */
  async now(): Promise<Date> {
    return onServer(this.url, async (client) => {
      const { rows } = await client.query<{ now: Date }>('SELECT clock_timestamp() AS now');
      return rows[0]?.now ?? new Date(NaN);
    });
  }

  /** Ends the helper's sessions, drops the database, and throws when sessions or advisory locks of others were left. */
  drop(): Promise<void> {
    return (this.dropping ??= this.dropOnce());
  }

  private async dropOnce(): Promise<void> {
    await Promise.all([this.pool.end(), ...this.clients.map((client) => client.end().catch(() => undefined))]);
    const left = await onServer(this.adminUrl, async (admin) => {
      const sessions = await this.sessionsLeft(admin);
      if (process.env.LEASE_KEEP_DB === '1') process.stderr.write(`kept ${this.url}\n`);
      else await admin.query(`DROP DATABASE ${escapeIdentifier(this.name)} WITH (FORCE)`);
      return sessions;
    });
    if (left.length > 0) throw new Error(`${this.name}: sessions were left behind:\n${describeSessions(left)}`);
  }

  private async sessionsLeft(admin: Client): Promise<Session[]> {
    for (const deadline = Date.now() + LEAK_DEADLINE_MS; ; await sleep(LEAK_POLL_MS)) {
      const { rows } = await admin.query<Session>(LEFT_SESSIONS, [[this.name]]);
      if (rows.length === 0 || Date.now() > deadline) return rows;
    }
  }
}

/** A fresh database; call `drop()` on it in `afterAll`. */
export function createTestDatabase(options?: TestDatabaseOptions): Promise<TestDatabase> {
  return TestDatabase.create(options);
}

function runUrl(): string {
  const url = process.env.LEASE_TEST_URL;
  if (url === undefined)
    throw new Error('LEASE_TEST_URL is not set: run the specs by jest, whose global setup sets it');
  return url;
}

function specName(): string {
  return basename(expect.getState().testPath ?? 'spec').replace(/\.spec\.[jt]s$/, '');
}

function settingsOfRun(): Record<string, string> {
  const { LEASE_TEST_ISOLATION: isolation, LEASE_TEST_TIMEZONE: timezone } = process.env;
  return {
    ...(isolation ? { default_transaction_isolation: isolation } : {}),
    ...(timezone ? { timezone } : {}),
  };
}
