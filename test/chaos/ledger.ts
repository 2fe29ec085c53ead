import { Pool, type PoolClient } from 'pg';

/**
 * What was promised and what was done, in tables outside of Leasehold's: at the end they are compared with what it says of itself. `effects` are
 * written in `lease.transaction`, in the transaction whose fence is on trial; everything else is committed by itself.
 */
export const LEDGER = `
  CREATE SCHEMA ledger;
  CREATE TABLE ledger.acks (job bigint NOT NULL, what text NOT NULL, key text, at timestamptz NOT NULL DEFAULT clock_timestamp());
  CREATE TABLE ledger.batches (batch bigint NOT NULL, members int NOT NULL, at timestamptz NOT NULL DEFAULT clock_timestamp());
  CREATE TABLE ledger.starts (job bigint NOT NULL, token bigint NOT NULL, worker text NOT NULL, at timestamptz NOT NULL DEFAULT clock_timestamp());
  CREATE TABLE ledger.effects (job bigint NOT NULL, token bigint NOT NULL, at timestamptz NOT NULL DEFAULT clock_timestamp());
  CREATE TABLE ledger.refused (job bigint NOT NULL, token bigint NOT NULL, at timestamptz NOT NULL DEFAULT clock_timestamp());
  CREATE TABLE ledger.commands (job bigint NOT NULL, command text NOT NULL, answer text NOT NULL, at timestamptz NOT NULL DEFAULT clock_timestamp());
  CREATE TABLE ledger.faults (fault text NOT NULL, detail text NOT NULL, at timestamptz NOT NULL DEFAULT clock_timestamp());
  CREATE INDEX ON ledger.starts (job);
  CREATE INDEX ON ledger.acks (job)`;

/** Writes on connections of its own, again and again until the database has answered: a fault that hits it must not make the ledger wrong. */
export class Ledger {
  private readonly pool: Pool;

  constructor(url: string, name = 'chaos ledger') {
    this.pool = new Pool({ connectionString: url, max: 4, application_name: name, connectionTimeoutMillis: 5000 });
    this.pool.on('error', () => undefined);
    this.pool.on('connect', (client: PoolClient) => client.on('error', () => undefined));
  }

  /** A row that is written twice after a lost answer says the same twice; what is counted is counted by job and token. */
  async write(sql: string, values: unknown[]): Promise<void> {
    for (let tries = 0; ; tries++) {
      try {
        await this.pool.query(sql, values);
        return;
      } catch (error) {
        if (tries > 200) throw error;
        await new Promise((resolve) => setTimeout(resolve, 50 + Math.random() * 100));
      }
    }
  }

  async read<R extends Record<string, unknown>>(sql: string, values: unknown[] = []): Promise<R[]> {
    return (await this.pool.query<R>(sql, values)).rows;
  }

  ack(ids: readonly string[], what: string, key: string | null = null): Promise<void> {
    return this.write(`INSERT INTO ledger.acks (job, what, key) SELECT unnest($1::bigint[]), $2, $3`, [ids, what, key]);
  }

  close(): Promise<void> {
    return this.pool.end();
  }
}
