import type { Client } from 'pg';
import { eventually } from './eventually';
import type { TestDatabase } from './test-database';

// A waiter may stand behind another waiter (the second at a row waits for the first), so blocking is followed through.
const WAITERS = `
  WITH RECURSIVE blocked AS (
    SELECT pid FROM pg_stat_activity WHERE $1::int = ANY (pg_blocking_pids(pid))
    UNION
    SELECT a.pid FROM blocked b JOIN pg_stat_activity a ON b.pid = ANY (pg_blocking_pids(a.pid))
  )
  SELECT a.pid, a.application_name, left(a.query, 200) AS query
  FROM blocked JOIN pg_stat_activity a USING (pid)
  WHERE a.datname = current_database()`;

/** A session that waits behind a gate. */
export interface Waiter {
  pid: number;
  application_name: string;
  query: string;
}

/** A session that holds what its statement locked until the test lets go, so that a rival has to wait at it. */
export class RowGate {
  private isDone = false;

  private constructor(
    private readonly database: TestDatabase,
    private readonly client: Client,
    readonly pid: number,
    /** What the locking statement returned. */
    readonly rows: Record<string, unknown>[],
  ) {}

  /** Opens a transaction, runs the statement (`SELECT … FOR UPDATE`) and holds. */
  static async hold(database: TestDatabase, sql: string, params?: unknown[]): Promise<RowGate> {
    const client = await database.client('lh_test_gate');
    await client.query('BEGIN ISOLATION LEVEL READ COMMITTED');
    const { rows } = await client.query<Record<string, unknown>>(sql, params);
    const { rows: own } = await client.query<{ pid: number }>('SELECT pg_backend_pid() AS pid');
    return new RowGate(database, client, own[0]?.pid ?? 0, rows);
  }

  /** Runs one more statement in the transaction of the gate. */
  async query(sql: string, params?: unknown[]): Promise<Record<string, unknown>[]> {
    return (await this.client.query<Record<string, unknown>>(sql, params)).rows;
  }

  /** Number of sessions of this database that wait for this one, directly or behind another waiter. */
  async waiters(): Promise<number> {
    return (await this.waiting()).length;
  }

  /** Resolves when that many stand at the gate. */
  async untilWaiting(count = 1): Promise<Waiter[]> {
    return eventually(
      async () => {
        const found = await this.waiting();
        return found.length >= count ? found : undefined;
      },
      { state: () => this.database.query('SELECT pid, application_name, wait_event, query FROM pg_stat_activity') },
    );
  }

  /** Commits, which lets the waiters go on. */
  release(): Promise<void> {
    return this.end('COMMIT');
  }

  rollback(): Promise<void> {
    return this.end('ROLLBACK');
  }

  private waiting(): Promise<Waiter[]> {
    return this.database.query<Waiter & Record<string, unknown>>(WAITERS, [this.pid]);
  }

  private async end(command: 'COMMIT' | 'ROLLBACK'): Promise<void> {
    if (this.isDone) return;
    this.isDone = true;
    try {
      await this.client.query(command);
    } finally {
      await this.client.end();
    }
  }
}
