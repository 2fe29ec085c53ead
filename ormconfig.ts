import 'reflect-metadata';
import { MIGRATIONS_TABLE, jobEntity, leaseMigrations } from '@leasehold/nestjs';
import { DataSource, type DataSourceOptions } from 'typeorm';

/** TypeORM's settings for the demo, the tests and the TypeORM command line. The schema must exist: `CREATE SCHEMA "leasehold"`. */
export const ormOptions = (
  url = process.env.DATABASE_URL ?? 'postgres://postgres:postgres@127.0.0.1:5432/leasehold',
  schema = 'leasehold',
) =>
  ({
    type: 'postgres' as const,
    url,
    schema,
    entities: [jobEntity(schema)],
    migrations: leaseMigrations(schema),
    migrationsTableName: MIGRATIONS_TABLE,
    synchronize: false,
    installExtensions: false,
    applicationName: 'leasehold app',
  }) satisfies DataSourceOptions;

export default new DataSource(ormOptions());
