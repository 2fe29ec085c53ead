import { Client, type QueryResultRow, escapeIdentifier } from 'pg';

/** A session of the benchmark's own in a database that it may make and drop. */
export class Database {
  private constructor(
    private readonly admin: Client,
    private readonly client: Client,
    private readonly name: string,
    readonly url: string,
  ) {}

  /** Makes it anew. */
  static async create(serverUrl: string, name: string): Promise<Database> {
    const admin = await connect(serverUrl);
    try {
      await drop(admin, name);
      await admin.query(`CREATE DATABASE ${escapeIdentifier(name)} TEMPLATE template0`);
      const url = new URL(serverUrl);
      url.pathname = `/${name}`;
      return new Database(admin, await connect(url.href), name, url.href);
    } catch (error) {
      await admin.end();
      throw error;
    }
  }

  async query<R extends QueryResultRow>(sql: string, values?: unknown[]): Promise<R[]> {
    return (await this.client.query<R>(sql, values)).rows;
  }

  /** Visibility map, statistics and dirty pages as they are after a while, so that none of it falls into the measurement. */
  async rest(): Promise<void> {
    await this.client.query('VACUUM ANALYZE');
    await this.client.query('CHECKPOINT');
  }

  /** Bytes of log that the server has written since its beginning. */
  async walBytes(): Promise<number> {
    const [row] = await this.query<{ bytes: number }>(
      "SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::float8 AS bytes",
    );
    return row?.bytes ?? 0;
  }

  /** Row versions that updates and deletes have left behind, ever. Sessions report theirs late: close them before. */
  async deadMade(): Promise<number> {
    const [row] = await this.query<{ dead: number }>(
      'SELECT coalesce(sum(n_tup_upd + n_tup_del), 0)::float8 AS dead FROM pg_stat_user_tables',
    );
    return row?.dead ?? 0;
  }

  /** Those that no vacuum has removed yet. */
  async deadNow(): Promise<number> {
    const [row] = await this.query<{ dead: number }>(
      'SELECT coalesce(sum(n_dead_tup), 0)::float8 AS dead FROM pg_stat_user_tables',
    );
    return row?.dead ?? 0;
  }

  async close(): Promise<void> {
    await this.client.end();
    await drop(this.admin, this.name);
    await this.admin.end();
  }
}

export async function serverVersion(url: string): Promise<string> {
  const client = await connect(url);
  try {
    const { rows } = await client.query<{ version: string }>("SELECT current_setting('server_version') AS version");
    return rows[0]?.version ?? 'unknown';
  } finally {
    await client.end();
  }
}

async function connect(url: string): Promise<Client> {
  const client = new Client({ connectionString: url, application_name: 'bench' });
  client.on('error', () => undefined);
  await client.connect();
  return client;
}

async function drop(admin: Client, name: string): Promise<void> {
  await admin.query(`DROP DATABASE IF EXISTS ${escapeIdentifier(name)} WITH (FORCE)`);
}
