import type { MigrationInterface } from 'typeorm';
import { Schema } from '../schema';
import { core } from './1764500000000-core';

/** TypeORM's migrations table, inside our own schema: no rights on `public` are needed. */
export const MIGRATIONS_TABLE = 'migrations';

/**
 * Leasehold's migrations as TypeORM classes, for `DataSourceOptions.migrations`. Use them with `schema` set to the same name and
 * `migrationsTableName: 'migrations'`, or let the module run them (`migrate: true`).
 */
export const leaseMigrations = (schema = 'leasehold'): (new () => MigrationInterface)[] => {
  const { quoted } = new Schema(schema);
  return [core(quoted)];
};
