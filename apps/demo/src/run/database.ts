import { randomBytes } from 'node:crypto';
import { startEmbeddedPostgres } from '@leasehold/embedded-postgres';
import { Client, type ClientConfig, type QueryResultRow, escapeIdentifier } from 'pg';
import { DemoError, UsageError } from '../errors';

/** Where a run keeps its jobs: a schema of its own, so that runs never mix. */
export interface RunDatabase {
  url: string;
  schema: string;
  /** One sentence about it. */
  description: string;
  readonly query: <R extends QueryResultRow>(sql: string, values?: unknown[]) => Promise<R[]>;
  /** Closes it: an embedded server is stopped, a schema on the user's own server is dropped. Idempotent. */
  close(): Promise<void>;
}

const CONNECT_MS = 10_000;

/** @param url the user's own server; undefined: an embedded one, with its data in `dataDir` or a temporary folder */
export async function openDatabase(url: string | undefined, dataDir: string | undefined): Promise<RunDatabase> {
  const stamp = new Date().toISOString().replace(/\D/g, '').slice(0, 14);
  const schema = `leasehold_demo_${stamp}_${randomBytes(2).toString('hex')}`;
  if (url !== undefined) {
    assertUrl(url);
    const client = await connect(url);
    const description = `${nameOf(url)}, schema ${schema} (dropped at the end)`;
    return { url, schema, description, query: queryOf(client), close: once(() => dropAndEnd(client, schema)) };
  }
  const server = await startEmbeddedPostgres(dataDir === undefined ? {} : { dataDir });
  try {
    const client = await connect(server.url);
    const where = dataDir === undefined ? 'temporary data' : `data kept in ${server.dataDir}`;
    return {
      url: server.url,
      schema,
      description: `embedded, ${server.url}, ${where}, schema ${schema}`,
      query: queryOf(client),
      close: once(async () => {
        await client.end().catch(() => undefined);
        await server.stop();
      }),
    };
  } catch (error) {
    await server.stop();
    throw error;
  }
}

const queryOf =
  (client: Client): RunDatabase['query'] =>
  async <R extends QueryResultRow>(sql: string, values?: unknown[]) =>
    (await client.query<R>(sql, values)).rows;

async function connect(url: string): Promise<Client> {
  const config: ClientConfig = {
    connectionString: url,
    connectionTimeoutMillis: CONNECT_MS,
    query_timeout: 60_000,
    application_name: 'leasehold demo',
  };
  const client = new Client(config);
  client.on('error', () => undefined);
  try {
    await client.connect();
    return client;
  } catch (error) {
    const { code, message } = error as NodeJS.ErrnoException;
    const why = message || code || 'unknown';
    throw new DemoError(`Cannot connect to PostgreSQL at ${nameOf(url)}: ${why}`, { cause: error });
  }
}

async function dropAndEnd(client: Client, schema: string): Promise<void> {
  try {
    await client.query(`DROP SCHEMA IF EXISTS ${escapeIdentifier(schema)} CASCADE`);
  } catch (error) {
    const { message } = error as Error;
    process.stderr.write(`Schema ${schema} could not be dropped (${message}): drop it by hand\n`);
  } finally {
    await client.end().catch(() => undefined);
  }
}

function assertUrl(url: string): void {
  if (!/^postgres(ql)?:\/\//.test(url)) {
    throw new UsageError(
      'DATABASE_URL must begin with postgres:// or postgresql://; unset it to use the embedded server',
    );
  }
}

/** Host and database of a URL, without its password. */
function nameOf(url: string): string {
  try {
    const { host, pathname } = new URL(url);
    return `${host || 'localhost'}${pathname}`;
  } catch {
    return 'DATABASE_URL';
  }
}

function once(work: () => Promise<void>): () => Promise<void> {
  let running: Promise<void> | undefined;
  return () => (running ??= work());
}
