import type { MigrationInterface } from 'typeorm';
import { MIGRATIONS_TABLE } from './migrations';

/** Where TypeORM records what was run, in our own schema; made and filled here just as TypeORM does it, so that either may go on. */
export const recordTable = (s: string): string => `${s}."${MIGRATIONS_TABLE}"`;

export const createRecordSql = (s: string): string =>
  `CREATE TABLE IF NOT EXISTS ${recordTable(s)} ` +
  '("id" SERIAL PRIMARY KEY, "timestamp" bigint NOT NULL, "name" character varying NOT NULL)';

/** @param migration named as TypeORM wants it, with the timestamp behind */
export const recordSql = (s: string, { name = '' }: MigrationInterface): string =>
  `INSERT INTO ${recordTable(s)} ("timestamp", "name") VALUES (${/\d{13}$/.exec(name)?.[0]}, '${name}')`;
