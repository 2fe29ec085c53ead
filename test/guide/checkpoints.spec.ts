import { type Handler, type Job, JobHandler, type Lease } from '@leasehold/nestjs';
import { Injectable } from '@nestjs/common';
import { type TestDatabase, createTestDatabase, startLeaseApp } from '../support';
import { untilState } from '../support/job-states';
import { expectPageShowsSpec } from '../support/page-examples';

interface Page {
  rows: string[];
  next: string | null;
}

@Injectable()
class Crm {
  readonly asked: (string | null)[] = [];
  failAt: string | null = 'p2';
  page(cursor: string | null): Promise<Page> {
    this.asked.push(cursor);
    if (cursor === this.failAt) {
      this.failAt = null;
      return Promise.reject(new Error('the CRM is down'));
    }
    const n = cursor === null ? 0 : Number(cursor.slice(1));
    return Promise.resolve({ rows: [`row ${n}`], next: n < 3 ? `p${n + 1}` : null });
  }
}

// #region handler
interface Position {
  cursor: string | null;
  rows: number;
}

@JobHandler('crm.import', { backoff: '1ms', checkpoint: { version: 2, upgrade: fromVersion1 } })
export class ImportCustomers implements Handler<null, number, Position> {
  constructor(private readonly crm: Crm) {}

  async handle({ checkpoint }: Job<null, Position>, lease: Lease): Promise<number> {
    let { cursor, rows } = checkpoint ?? { cursor: null, rows: 0 };
    do {
      const page = await this.crm.page(cursor);
      rows += page.rows.length;
      cursor = page.next;
      lease.progress(rows, undefined, `at ${cursor ?? 'the end'}`);
      await lease.checkpoint({ cursor, rows });
    } while (cursor !== null);
    lease.log(`imported ${rows} rows`);
    return rows;
  }
}

/** Version 1 saved the cursor alone. Jobs that were saved by it outlive the deploy. */
function fromVersion1(checkpoint: unknown): Position {
  return { cursor: checkpoint as string, rows: 0 };
}
// #endregion

let db: TestDatabase;
beforeAll(async () => {
  db = await createTestDatabase({ name: 'guide-checkpoints' });
});
afterAll(() => db.drop());

it('docs/guide/checkpoints.md: the next run goes on from the last one', async () => {
  const { app, jobs } = await startLeaseApp(db, { handlers: [ImportCustomers, Crm] });
  const id = await jobs.enqueue(ImportCustomers, null);
  await untilState(jobs, id, 'completed');
  expect(app.get(Crm).asked).toEqual([null, 'p1', 'p2', 'p2', 'p3']);
  // #region read
  const { saved } = await jobs.get(id);
  console.log(saved?.progress); // { current: 4, message: 'at the end' }
  console.log(saved?.log.map(({ line }) => line)); // [ 'imported 4 rows' ]
  // #endregion
  expect(saved).toMatchObject({ progress: { current: 4, message: 'at the end' }, log: [{ line: 'imported 4 rows' }] });
  expect(fromVersion1('p2')).toEqual({ cursor: 'p2', rows: 0 });
});

it('docs/guide/checkpoints.md shows the code of this file', () =>
  expectPageShowsSpec('docs/guide/checkpoints.md', 'test/guide/checkpoints.spec.ts'));
