import { EntitySchema } from 'typeorm';

/** A row of `jobs`: what a job is, written once. What state it is in stands elsewhere; see the view `job_status`. */
export interface JobRow {
  id: string;
  queue: string;
  kind: string;
  payload: unknown;
  priority: number;
  tags: string[] | null;
  createdAt: Date;
}

/** TypeORM mapping of `jobs`, for relations of your own to a job. Read-only: jobs are written by JobsService alone. */
export const jobEntity = (schema = 'leasehold'): EntitySchema<JobRow> =>
  new EntitySchema<JobRow>({
    name: 'LeaseholdJob',
    tableName: 'jobs',
    schema,
    synchronize: false,
    columns: {
      id: { type: 'bigint', primary: true },
      queue: { type: 'text' },
      kind: { type: 'text' },
      payload: { type: 'json' },
      priority: { type: 'smallint' },
      tags: { type: 'text', array: true, nullable: true },
      createdAt: { type: 'timestamptz', name: 'created_at' },
    },
  });
