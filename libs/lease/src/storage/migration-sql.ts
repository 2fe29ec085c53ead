import type { QueryRunner } from 'typeorm';
import { createRecordSql, recordSql } from './migration-record.sql';
import { leaseMigrations } from './migrations';
import { Schema } from './schema';

/**
 * The migrations as plain SQL, for teams whose DBAs run it: one transaction that also records what it did, so that the module
 * finds the schema up to date. `after` = the name of the last migration already applied, to get only what is new.
 */
export async function migrationSql(schema = 'leasehold', after?: string): Promise<string> {
  const { quoted } = new Schema(schema);
  const out: string[] = ['BEGIN'];
  out.push(`SELECT pg_advisory_xact_lock(${new Schema(schema).lockKey('migrate')})`);
  out.push(`CREATE SCHEMA IF NOT EXISTS ${quoted}`);
  out.push(createRecordSql(quoted));
  const migrations = leaseMigrations(schema).map((Migration) => new Migration());
  const from = after === undefined ? 0 : migrations.findIndex((m) => m.name === after) + 1;
  if (after !== undefined && from === 0) {
    throw new Error(`No migration is called ${after}; there are: ${migrations.map((m) => m.name).join(', ')}`);
  }
  for (const migration of migrations.slice(from)) {
    const recorder = {
      query: (statement: string) => {
        out.push(statement.trim());
        return Promise.resolve([]);
      },
    };
    await migration.up(recorder as unknown as QueryRunner);
    out.push(recordSql(quoted, migration));
  }
  out.push('COMMIT');
  return out.map((statement) => `${statement};\n`).join('\n');
}
