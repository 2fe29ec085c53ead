import {
  BatchesService,
  type BatchEnd,
  type BatchId,
  type Handler,
  type Job,
  JobHandler,
  type Lease,
} from '@leasehold/nestjs';
import { Injectable } from '@nestjs/common';
import { type TestDatabase, createTestDatabase, eventually, startLeaseApp } from '../support';
import { expectPageShowsSpec } from '../support/page-examples';

@JobHandler('page.fetch')
class FetchPage implements Handler<{ url: string }, { bytes: number }> {
  handle({ payload }: Job<{ url: string }>): { bytes: number } {
    return { bytes: payload.url.length };
  }
}
@JobHandler('site.publish')
class PublishSite implements Handler<{ site: string }, string> {
  handle({ payload }: Job<{ site: string }>): string {
    return payload.site;
  }
}

const totals = new Map<BatchId, number>();

// #region closing
@JobHandler('site.totals')
export class SiteTotals implements Handler<{ site: string; batch: BatchEnd }, number> {
  constructor(private readonly batches: BatchesService) {}

  async handle({ payload }: Job<{ site: string; batch: BatchEnd }>): Promise<number> {
    let bytes = 0;
    for await (const { state, result } of this.batches.results<{ bytes: number }>(payload.batch.id)) {
      if (state === 'completed') bytes += result?.bytes ?? 0;
    }
    totals.set(payload.batch.id, bytes);
    return bytes;
  }
}
// #endregion

// #region create
@Injectable()
export class Sites {
  constructor(private readonly batches: BatchesService) {}

  async crawl(site: string, urls: string[]): Promise<BatchId> {
    const { id } = await this.batches.create(
      `crawl ${site}`,
      [
        ...urls.map((url) => ({ handler: FetchPage, payload: { url }, name: url })),
        { handler: PublishSite, payload: { site }, name: 'publish', dependsOn: urls.slice(0, 2) },
      ],
      { onFinished: { handler: SiteTotals, payload: { site } } },
    );
    return id;
  }
}
// #endregion

// #region open
@JobHandler('site.discover')
export class Discover implements Handler<{ site: string }, void> {
  constructor(private readonly batches: BatchesService) {}

  async handle({ payload, batchId }: Job<{ site: string }>, lease: Lease): Promise<void> {
    const pages = ['/', '/about', '/contact'].map((path) => `${payload.site}${path}`);
    // Again after a crash half-way: the same names are added once, and a zombie adds none.
    await this.batches.add(
      batchId!,
      pages.map((url) => ({ handler: FetchPage, payload: { url }, name: url })),
      { under: lease },
    );
    await this.batches.seal(batchId!, { under: lease });
  }
}
// #endregion

let db: TestDatabase;
beforeAll(async () => {
  db = await createTestDatabase({ name: 'guide-batches' });
});
afterAll(() => db.drop());

it('docs/guide/batches.md: a batch with edges and a closing job, one that is added to, and the builder', async () => {
  const { app, batches } = await startLeaseApp(db, { handlers: [FetchPage, PublishSite, SiteTotals, Sites, Discover] });
  const id = await app.get(Sites).crawl('example.org', ['a', 'bb', 'ccc']);
  expect(await batches.waitFor(id)).toMatchObject({ status: 'completed', members: 4 });
  await eventually(() => totals.get(id) === 6);

  const open = await batches.create('discovered', [{ handler: Discover, payload: { site: 'x' }, name: 'discover' }], {
    open: true,
  });
  expect(await batches.waitFor(open.id)).toMatchObject({ status: 'completed', members: 4 });

  const urls = ['u', 'vv'];
  // #region builder
  const builder = batches.build('crawl and publish');
  const pages = builder.fanOut(
    'page',
    FetchPage,
    urls.map((url) => ({ url })),
  );
  builder.chain(
    'after',
    [
      [PublishSite, { site: 'staging' }],
      [PublishSite, { site: 'live' }],
    ],
    { dependsOn: pages },
  );
  const { id: built } = await builder
    .closing({ handler: SiteTotals, payload: { site: 'live' } })
    .create({ failFast: true });
  // #endregion
  expect(await batches.waitFor(built)).toMatchObject({ status: 'completed', members: 4 });
  await eventually(() => totals.get(built) === 3);

  // #region watch
  const { status, counts, done, estimatedEnd } = await batches.get(id);
  // #endregion
  expect({ status, counts, done, estimatedEnd }).toMatchObject({
    status: 'completed',
    counts: { completed: 4 },
    done: 1,
    estimatedEnd: null,
  });
});

it('docs/guide/batches.md shows the code of this file', () =>
  expectPageShowsSpec('docs/guide/batches.md', 'test/guide/batches.spec.ts'));
