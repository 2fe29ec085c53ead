import { Client, type ClientConfig, type PoolConfig, type QueryConfig, type QueryResultRow, types } from 'pg';
import type { DataSourceOptions } from 'typeorm';
import { QueryTimeoutError } from '../errors';
import { within } from './delays';
import type { ConnectionOptions } from '../options/lease-options';

/**
 * Our own parsers, so that neither a global `types.setTypeParser` of the application nor ours can change what the other reads:
 * bigint stays text, timestamps become Date, JSON is parsed.
 */
const PARSERS: Record<number, (text: string) => unknown> = {
  16: (text) => text === 't',
  21: Number,
  23: Number,
  26: Number,
  701: Number,
  114: (text) => JSON.parse(text) as unknown,
  3802: (text) => JSON.parse(text) as unknown,
  1009: types.getTypeParser(1009 as never, 'text') as (text: string) => unknown, // text[]
  1184: (text) => new Date(text.replace(' ', 'T').replace(/([+-]\d\d)$/, '$1:00')),
};
const identity = (text: string): string => text;

export const ownTypes = { getTypeParser: (oid: number) => PARSERS[oid] ?? identity } as ClientConfig['types'];

/** Where to connect. `pooled`: the pool goes through a transaction-mode pooler, `direct` does not. */
export interface ConnectionTargets {
  pool: PoolConfig;
  direct: ClientConfig;
  pooled: boolean;
}

export function connectionTargets(options: ConnectionOptions): ConnectionTargets {
  const pool = options.url
    ? { connectionString: options.url }
    : options.dataSource
      ? fromTypeOrm(options.dataSource.options)
      : { ...options.options };
  const pooled = options.directUrl !== undefined;
  return { pool, direct: pooled ? { connectionString: options.directUrl } : pool, pooled };
}

function fromTypeOrm(options: DataSourceOptions): PoolConfig {
  if (options.type !== 'postgres')
    throw new Error(`connection.dataSource is of type '${options.type}', not 'postgres'`);
  const primary = options.replication?.master ?? options;
  const { max: _max, min: _min, ...extra } = (options.extra ?? {}) as PoolConfig;
  return {
    ...(primary.url ? { connectionString: primary.url } : {}),
    ...(primary.host === undefined ? {} : { host: primary.host }),
    ...(primary.port === undefined ? {} : { port: primary.port }),
    ...(primary.username === undefined ? {} : { user: primary.username }),
    ...(primary.password === undefined ? {} : { password: primary.password }),
    ...(primary.database === undefined ? {} : { database: primary.database }),
    ...(primary.ssl === undefined ? {} : { ssl: primary.ssl as PoolConfig['ssl'] }),
    ...extra,
  };
}

/** Server settings of one connection, sent with the start-up packet so that no round trip is spent and none can be missed. */
export function startupOptions(settings: Record<string, string | number>, before?: string): string {
  const own = Object.entries(settings).map(([key, value]) => `-c ${key}=${String(value).replaceAll(' ', '\\ ')}`);
  return [before, ...own].filter(Boolean).join(' ');
}

/** What every connection of ours has: whatever the database's or the role's defaults say, our statements see these. */
export const SESSION_SETTINGS = {
  default_transaction_isolation: 'read committed',
  timezone: 'UTC',
  datestyle: 'ISO',
  intervalstyle: 'postgres',
} as const;

/**
 * One query with a client-side limit (law 8). When it passes, the connection is destroyed: its socket may be half-open, and a
 * late answer must not meet the next query.
 */
export async function limitedQuery<R extends QueryResultRow>(
  client: Client,
  query: QueryConfig,
  timeoutMs: number,
): Promise<R[]> {
  let timer: NodeJS.Timeout | undefined;
  const limit = new Promise<never>((_, reject) => {
    timer = setTimeout(() => {
      reject(new QueryTimeoutError(`no answer within ${timeoutMs} ms; the connection was destroyed`));
      destroy(client);
    }, timeoutMs);
  });
  const answer = client.query<R>(query);
  answer.catch(() => undefined); // After the limit nobody listens any more.
  try {
    return (await Promise.race([answer, limit])).rows;
  } finally {
    clearTimeout(timer);
  }
}

/** Ends a connection without waiting for the other side. */
export function destroy(client: Client): void {
  const { connection } = client as unknown as { connection?: { stream?: { destroy(): void } } };
  connection?.stream?.destroy();
}

const GOODBYE_MS = 500;

/** A goodbye, so that the server frees our locks at once; not waited for longer than a moment, since the line may be dead. */
export async function endClient(client: Client): Promise<void> {
  await within(
    GOODBYE_MS,
    client.end().catch(() => undefined),
  );
  destroy(client);
}
