import { Logger } from '@nestjs/common';
import { Client, type ClientConfig } from 'pg';
import { DataSource } from 'typeorm';
import { SchemaError } from '../errors';
import type { ResolvedOptions } from '../options/lease-options';
import { SESSION_SETTINGS, ownTypes, startupOptions } from './connection';
import { MIGRATIONS_TABLE, leaseMigrations } from './migrations';
import type { Schema } from './schema';

/** Longer than any migration should take; a boot that waits for another's migration must not fail first. */
const MIGRATION_LIMIT_MS = 120_000;

/**
 * Makes sure that the schema is the one this code needs. With `migrate` it is created or updated, by one of any number of
 * instances that boot at once (a session advisory lock, held on a connection of its own; the others wait and find it done: F:J10).
 * A schema newer than this code is fine: functions carry versions, and the old ones stay through a rolling deploy.
 */
export async function prepareSchema(direct: ClientConfig, schema: Schema, options: ResolvedOptions): Promise<void> {
  const client = new Client({
    connectionTimeoutMillis: options.connection.queryTimeoutMs,
    ...direct,
    types: ownTypes,
    options: startupOptions(
      { ...SESSION_SETTINGS, statement_timeout: MIGRATION_LIMIT_MS, lock_timeout: MIGRATION_LIMIT_MS },
      direct.options,
    ),
  });
  client.on('error', () => undefined);
  await client.connect();
  try {
    if ((await pending(client, schema)).length === 0) return;
    if (!options.migrate) {
      const missing = await pending(client, schema);
      throw new SchemaError(
        `Schema ${schema.name} lacks ${missing.join(', ')}. Set migrate: true, run TypeORM's migration:run, ` +
          `or let your DBA run what 'npx leasehold migration-sql --schema ${schema.name}' prints`,
      );
    }
    await client.query('SELECT pg_advisory_lock($1)', [schema.lockKey('migrate')]);
    const missing = await pending(client, schema);
    if (missing.length === 0) return;
    const { rows } = await client.query<{ there: boolean }>('SELECT to_regnamespace($1) IS NOT NULL AS there', [
      schema.quoted,
    ]);
    if (!rows[0]?.there) await client.query(`CREATE SCHEMA ${schema.quoted}`);
    await runTypeOrm(direct, schema);
    new Logger('Leasehold').log(`Schema ${schema.name} is up to date: ran ${missing.join(', ')}`);
  } finally {
    await client.end().catch(() => undefined);
  }
}

/** Names of our migrations that the schema has not recorded. */
async function pending(client: Client, schema: Schema): Promise<string[]> {
  const names = leaseMigrations(schema.name).map((Migration) => new Migration().name ?? Migration.name);
  const table = `${schema.quoted}."${MIGRATIONS_TABLE}"`;
  const { rows } = await client.query<{ there: boolean }>('SELECT to_regclass($1) IS NOT NULL AS there', [table]);
  if (!rows[0]?.there) return names;
  const done = await client.query<{ name: string }>(`SELECT name FROM ${table}`);
  return names.filter((name) => !done.rows.some((row) => row.name === name));
}

async function runTypeOrm(direct: ClientConfig, schema: Schema): Promise<void> {
  const source = new DataSource({
    type: 'postgres',
    ...(direct.connectionString ? { url: direct.connectionString } : {}),
    ...(direct.host === undefined ? {} : { host: direct.host }),
    ...(direct.port === undefined ? {} : { port: Number(direct.port) }),
    ...(direct.user === undefined ? {} : { username: direct.user }),
    ...(direct.password === undefined ? {} : { password: direct.password as string }),
    ...(direct.database === undefined ? {} : { database: direct.database }),
    ssl: direct.ssl as boolean | undefined,
    schema: schema.name,
    migrations: leaseMigrations(schema.name),
    migrationsTableName: MIGRATIONS_TABLE,
    migrationsTransactionMode: 'each',
    installExtensions: false,
    applicationName: 'leasehold migrations',
    extra: { max: 1, options: startupOptions(SESSION_SETTINGS, direct.options) },
  });
  await source.initialize();
  try {
    await source.runMigrations();
  } finally {
    await source.destroy();
  }
}
