import { Logger } from '@nestjs/common';
import { Client, type ClientConfig, type QueryResultRow } from 'pg';
import type { MigrationInterface, QueryRunner } from 'typeorm';
import { SchemaError } from '../errors';
import type { ResolvedOptions } from '../options/lease-options';
import { SESSION_SETTINGS, endClient, limitedQuery, ownTypes, startupOptions } from './connection';
import { leaseMigrations } from './migrations';
import { createRecordSql, recordSql, recordTable } from './migration-record.sql';
import type { Schema } from './schema';

/** Longer than any migration should take; a boot that waits for another's migration must not fail first. */
const MIGRATION_LIMIT_MS = 120_000;

type Run = <R extends QueryResultRow = QueryResultRow>(text: string, values?: unknown[]) => Promise<R[]>;

/**
 * Makes sure that the schema is the one this code needs, and its partitions are ahead. With `migrate` it is created or updated, by one of any
 * number of instances that boot at once (a session advisory lock; the others wait and find it done: F:J10). A schema newer than this
 * code is fine: functions carry versions, and the old ones stay through a rolling deploy.
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
  const run: Run = (text, values = []) => limitedQuery(client, { text, values }, MIGRATION_LIMIT_MS * 1.1);
  try {
    await client.connect();
    const missing = await pending(run, schema);
    if (missing.length > 0 && !options.migrate) {
      throw new SchemaError(
        `Schema ${schema.name} lacks ${missing.map(({ name }) => name).join(', ')}. Set migrate: true, run TypeORM's migration:run, ` +
          `or let your DBA run what 'npx leasehold migration-sql --schema ${/^[\w-]+$/.test(schema.name) ? schema.name : JSON.stringify(schema.name)}' prints`,
      );
    }
    if (missing.length > 0) await migrate(run, schema);
    await run(`SELECT ${schema.quoted}.ensure_partitions_v1(14)`);
  } finally {
    await endClient(client);
  }
}

/**
 * Runs the migrations as TypeORM would, each in a transaction and recorded in its table, but under a lock that comes first, and for
 * schema names that TypeORM does not take (with a dot or a quote in them).
 */
async function migrate(run: Run, schema: Schema): Promise<void> {
  await run('SELECT pg_advisory_lock($1)', [schema.lockKey('migrate')]);
  const missing = await pending(run, schema);
  if (missing.length === 0) return;
  const [found] = await run<{ there: boolean }>('SELECT to_regnamespace($1) IS NOT NULL AS there', [schema.quoted]);
  if (!found?.there) await run(`CREATE SCHEMA ${schema.quoted}`);
  await run(createRecordSql(schema.quoted));
  for (const migration of missing) {
    await run('BEGIN');
    await migration.up({ query: run } as unknown as QueryRunner);
    await run(recordSql(schema.quoted, migration));
    await run('COMMIT');
  }
  const names = missing.map(({ name }) => name).join(', ');
  new Logger('Leasehold').log(`Schema ${schema.name} is up to date: ran ${names}`);
}

/** Our migrations that the schema has not recorded. */
async function pending(run: Run, schema: Schema): Promise<MigrationInterface[]> {
  const migrations = leaseMigrations(schema.name).map((Migration) => new Migration());
  const table = recordTable(schema.quoted);
  const [found] = await run<{ there: boolean }>('SELECT to_regclass($1) IS NOT NULL AS there', [table]);
  if (!found?.there) return migrations;
  const done = await run<{ name: string }>(`SELECT name FROM ${table}`);
  return migrations.filter(({ name }) => !done.some((row) => row.name === name));
}
