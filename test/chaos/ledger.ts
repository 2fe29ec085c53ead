import { Pool, type PoolClient } from 'pg';

/**
 * What was promised and what was done, in tables outside of Leasehold's: at the end they are compared with what it says of itself. `effects` are
 * written in `lease.transaction`, in the transaction whose fence is on trial; everything else is committed by itself.
 */
const TABLES: Record<string, string> = {
  // An enqueue that was answered. `due_ms`: how much later it was to run.
  acks: 'job bigint NOT NULL, what text NOT NULL, due_ms int NOT NULL DEFAULT 0',
  batches: 'batch bigint NOT NULL, members int NOT NULL',
  starts: 'job bigint NOT NULL, token bigint NOT NULL, worker text NOT NULL',
  // The handler has returned or thrown; what becomes of that is still to be said.
  ends: 'job bigint NOT NULL, token bigint NOT NULL, worker text NOT NULL',
  completed: 'job bigint NOT NULL, token bigint NOT NULL',
  refused: 'job bigint NOT NULL, token bigint NOT NULL',
  effects: 'job bigint NOT NULL, token bigint NOT NULL',
  commands: 'job bigint NOT NULL, command text NOT NULL, answer text NOT NULL',
  // Workers that ended in order, all that they knew being in here.
  drained: 'worker text NOT NULL',
  // `victim`: a worker, or null: the database, and so everybody.
  faults:
    'id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, fault text NOT NULL, victim text, detail text, ended_at timestamptz',
};

export const LEDGER = `CREATE SCHEMA ledger; ${Object.entries(TABLES)
  .map(
    ([name, columns]) => `CREATE TABLE ledger.${name} (${columns}, at timestamptz NOT NULL DEFAULT clock_timestamp());`,
  )
  .join(' ')} ${['acks', 'starts', 'ends', 'completed', 'refused', 'effects', 'commands']
  .map((name) => `CREATE INDEX ON ledger.${name} (job);`)
  .join(' ')}`;

/** Writes on connections of its own, again and again until the database has answered: a fault that hits it must not make the ledger wrong. */
export class Ledger {
  private readonly pool: Pool;

  constructor(url: string, name = 'chaos ledger') {
    this.pool = new Pool({
      connectionString: url,
      max: 4,
      application_name: name,
      connectionTimeoutMillis: 5000,
      query_timeout: 20_000,
      // Whatever the database is told to be for others.
      options: '-c default_transaction_read_only=off -c default_transaction_isolation=read\\ committed',
    });
    this.pool.on('error', () => undefined);
    this.pool.on('connect', (client: PoolClient) => client.on('error', () => undefined));
  }

  /** A row that is written twice after a lost answer says the same twice; what is counted is counted by job and token. */
  async write(sql: string, values: unknown[]): Promise<void> {
    await this.insist(sql, values);
  }

  /** @returns the id that it was given */
  async insert(sql: string, values: unknown[]): Promise<string> {
    const [row] = await this.insist<{ id: string }>(sql, values);
    return row?.id ?? '';
  }

  async read<R extends Record<string, unknown>>(sql: string, values: unknown[] = []): Promise<R[]> {
    return (await this.pool.query<R>(sql, values)).rows;
  }

  ack(ids: readonly string[], what: string, dueMs = 0): Promise<void> {
    return this.write(`INSERT INTO ledger.acks (job, what, due_ms) SELECT unnest($1::bigint[]), $2, $3`, [
      ids,
      what,
      dueMs,
    ]);
  }

  private async insist<R extends Record<string, unknown>>(sql: string, values: unknown[]): Promise<R[]> {
    for (let tries = 0; ; tries++) {
      try {
        return (await this.pool.query<R>(sql, values)).rows;
      } catch (error) {
        if (tries > 200) throw error;
        await new Promise((resolve) => setTimeout(resolve, 50 + Math.random() * 100));
      }
    }
  }

  close(): Promise<void> {
    return this.pool.end();
  }
}
