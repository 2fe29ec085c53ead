import { type Handler, JobHandler, JobsService } from '@leasehold/nestjs';
import { Injectable } from '@nestjs/common';
import { type DataSource, DataSource as Source, type EntityManager } from 'typeorm';
import { type TestDatabase, createTestDatabase, startLeaseApp } from '../support';
import { expectPageShowsSpec } from '../support/page-examples';

@JobHandler('search.index')
class IndexDocument implements Handler<{ document: string }> {
  handle(): void {}
}

// #region modes
@Injectable()
export class Search {
  constructor(private readonly jobs: JobsService) {}

  /** One unfinished job a document; the answer says which. */
  async webhook(document: string): Promise<string> {
    const { id, outcome, state } = await this.jobs.enqueueUnique(IndexDocument, { document }, { key: document });
    return outcome === 'existing' ? `job ${id} is ${state} already` : `job ${id}`;
  }

  /** The newest payload and time, as long as the job has not started. */
  reschedule(document: string): Promise<string> {
    return this.jobs.enqueue(IndexDocument, { document }, { key: document, keyMode: 'replace', delay: '5m' });
  }

  /** What is written in this transaction is indexed for certain: by the job that waits, or by one that comes after the one that runs. */
  changed(document: string, manager: EntityManager): Promise<string> {
    return this.jobs.enqueue(IndexDocument, { document }, { key: document, keyMode: 'serial', manager });
  }

  /** At most once an hour, whatever becomes of it. */
  refresh(): Promise<string> {
    return this.jobs.enqueue(IndexDocument, { document: '*' }, { key: 'all', keyMode: { throttle: '1h' } });
  }

  /** Five seconds after the last keystroke, a minute after the first at the latest. */
  typed(document: string): Promise<string> {
    return this.jobs.enqueue(
      IndexDocument,
      { document },
      { key: `draft ${document}`, keyMode: { debounce: '5s', maxWait: '1m' } },
    );
  }
}
// #endregion

let db: TestDatabase;
let dataSource: DataSource;
beforeAll(async () => {
  db = await createTestDatabase({ name: 'guide-unique-jobs' });
  dataSource = await new Source({ type: 'postgres', url: db.url }).initialize();
});
afterAll(async () => {
  await dataSource.destroy();
  await db.drop();
});

it('docs/guide/unique-jobs.md: the five modes', async () => {
  const { app, jobs } = await startLeaseApp(db, { handlers: [Search], options: { role: 'producer' } });
  const search = app.get(Search);
  expect(await search.webhook('a')).toMatch(/^job \d+$/);
  expect(await search.webhook('a')).toMatch(/^job \d+ is ready already$/);
  const id = await search.reschedule('a');
  expect((await jobs.get(id)).state).toBe('scheduled');
  expect(await dataSource.transaction((manager) => search.changed('a', manager))).toBe(id);
  expect(await search.refresh()).toBe(await search.refresh());
  expect(await search.typed('a')).toBe(await search.typed('a'));
});

it('docs/guide/unique-jobs.md shows the code of this file', () =>
  expectPageShowsSpec('docs/guide/unique-jobs.md', 'test/guide/unique-jobs.spec.ts'));
