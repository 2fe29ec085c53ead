import { setTimeout as sleep } from 'node:timers/promises';
import { Client } from 'pg';
import type { Ledger } from './ledger';

/** An error that writes of leases meet while it is on; in the tables of the ledger, and so without a connection of its own. */
const INJECTED = `
  CREATE TABLE ledger.injected (code text NOT NULL, share float8 NOT NULL, until timestamptz NOT NULL);
  CREATE FUNCTION ledger.stumble() RETURNS trigger LANGUAGE plpgsql AS $fn$
  DECLARE v record;
  BEGIN
    SELECT * INTO v FROM ledger.injected WHERE until > clock_timestamp() AND random() < share LIMIT 1;
    IF FOUND THEN RAISE EXCEPTION 'injected' USING ERRCODE = v.code; END IF;
    RETURN NULL;
  END $fn$;
  CREATE TRIGGER stumble BEFORE INSERT OR UPDATE OR DELETE ON leasehold.leases FOR EACH STATEMENT EXECUTE FUNCTION ledger.stumble();
  CREATE TRIGGER stumble BEFORE INSERT OR UPDATE OR DELETE ON leasehold.ready FOR EACH STATEMENT EXECUTE FUNCTION ledger.stumble();
  CREATE TRIGGER stumble BEFORE INSERT OR UPDATE OR DELETE ON leasehold.workers FOR EACH STATEMENT EXECUTE FUNCTION ledger.stumble()`;

/** What somebody can do to a database who has a connection to it. Everything that is begun here ends here. */
export class Trouble {
  constructor(
    private readonly url: () => string,
    private readonly ledger: Ledger,
  ) {}

  async prepare(): Promise<void> {
    await this.ledger.read(INJECTED);
  }

  async inject(code: string, share: number, ms: number): Promise<void> {
    await this.ledger.write(
      `INSERT INTO ledger.injected (code, share, until) VALUES ($1, $2, clock_timestamp() + $3 * interval '1 ms')`,
      [code, share, ms],
    );
    await sleep(ms);
  }

  lockRows(count: number, ms: number): Promise<void> {
    return this.inTransaction(async (client) => {
      await client.query(`SELECT FROM leasehold.leases ORDER BY job_id LIMIT $1 FOR UPDATE SKIP LOCKED`, [count]);
      await client.query(`SELECT FROM leasehold.ready ORDER BY job_id LIMIT $1 FOR UPDATE SKIP LOCKED`, [count]);
      await sleep(ms);
    });
  }

  lockTable(table: string, ms: number): Promise<void> {
    return this.inTransaction(async (client) => {
      await client.query(`LOCK TABLE leasehold.${table} IN ACCESS EXCLUSIVE MODE`);
      await sleep(ms);
    });
  }

  async readOnly(ms: number): Promise<void> {
    const set = async (how: string): Promise<void> => {
      await this.ledger.write(`ALTER DATABASE ${await this.database()} ${how}`, []);
      await this.ledger
        .read(
          `SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND application_name ~ '^(leasehold|lh:)'`,
        )
        .catch(() => undefined);
    };
    await set('SET default_transaction_read_only = on');
    await sleep(ms);
    await set('RESET default_transaction_read_only');
  }

  /** @returns how many connections were to be had */
  async crowd(ms: number): Promise<number> {
    const clients: Client[] = [];
    for (let refused = false; !refused && clients.length < 500;) {
      const client = this.client('chaos crowd');
      refused = await client.connect().then(
        () => false,
        () => true,
      );
      if (!refused) clients.push(client);
    }
    // Those who lose theirs now get none.
    await this.ledger
      .read(
        `SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name ~ '^leasehold' AND random() < 0.3`,
      )
      .catch(() => undefined);
    await sleep(ms);
    await Promise.all(clients.map((client) => client.end().catch(() => undefined)));
    return clients.length;
  }

  private async database(): Promise<string> {
    const [row] = await this.ledger.read<{ name: string }>('SELECT current_database() AS name');
    return row?.name ?? '';
  }

  private client(name: string): Client {
    const client = new Client({ connectionString: this.url(), application_name: name, connectionTimeoutMillis: 3000 });
    client.on('error', () => undefined);
    return client;
  }

  private async inTransaction(work: (client: Client) => Promise<void>): Promise<void> {
    const client = this.client('chaos locks');
    try {
      await client.connect();
      await client.query(`SET lock_timeout = '2s'`);
      await client.query('BEGIN');
      await work(client);
      await client.query('ROLLBACK');
    } catch {
      // It got none; so be it.
    } finally {
      await client.end().catch(() => undefined);
    }
  }
}
