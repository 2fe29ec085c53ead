import type { MigrationInterface, QueryRunner } from 'typeorm';
import { functionsSql } from '../schema/functions.sql';
import { tablesSql } from '../schema/tables.sql';
import { viewsSql } from '../schema/views.sql';
import { inLiteral } from '../schema/quote';

type MigrationClass = new () => MigrationInterface;

/** Jobs, their state tables, workers, the leader, and the functions that move jobs between the tables. */
export const core = (s: string): MigrationClass =>
  class Core implements MigrationInterface {
    readonly name = 'Core1764500000000';

    async up(runner: QueryRunner): Promise<void> {
      for (const statement of [...tablesSql(s), ...viewsSql(s), ...functionsSql(s)]) await runner.query(statement);
      await runner.query(`SELECT ${s}.ensure_partitions_v1(14)`);
    }

    async down(runner: QueryRunner): Promise<void> {
      const [{ count }] = (await runner.query(
        `SELECT (SELECT count(*) FROM ${s}.ready) + (SELECT count(*) FROM ${s}.waiting) + (SELECT count(*) FROM ${s}.leases) AS count`,
      )) as [{ count: string }];
      if (count !== '0') throw new Error(`${count} unfinished jobs are in ${s}; nothing was dropped`);
      await runner.query(`DROP VIEW ${s}.job_status, ${s}.job_runs`);
      // Before the tables: some take a row of one.
      await runner.query(`DO $do$ DECLARE f regprocedure; BEGIN
        FOR f IN SELECT oid::regprocedure FROM pg_proc WHERE pronamespace = '${inLiteral(s)}'::regnamespace
          AND (proname ~ '_v[0-9]+$' OR proname = 'enqueue') LOOP EXECUTE 'DROP FUNCTION ' || f; END LOOP; END $do$`);
      for (const name of [
        'jobs',
        'ready',
        'waiting',
        'leases',
        'finished',
        'runs',
        'workers',
        'leader',
        'queues',
        'checkpoints',
        'job_keys',
        'batches',
        'job_dependencies',
        'incarnation',
      ]) {
        await runner.query(`DROP TABLE ${s}.${name}`);
      }
      await runner.query(`DROP SEQUENCE ${s}.tokens, ${s}.positions, ${s}.lock_numbers`);
    }
  };
