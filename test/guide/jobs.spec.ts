import { type Handler, type Job, JobHandler, JobsService, QueuesService } from '@leasehold/nestjs';
import { Injectable } from '@nestjs/common';
import { IsInt, IsOptional, IsString } from 'class-validator';
import { Client } from 'pg';
import { type TestDatabase, createTestDatabase, eventually, startHandWorker, startLeaseApp } from '../support';
import { expectPageShowsSpec, readPage } from '../support/page-examples';

// #region handler
export class ResizeDto {
  @IsString()
  path: string;

  @IsOptional()
  @IsInt()
  width?: number;
}

@JobHandler('image.resize', { queue: 'images', concurrency: 4, deadline: '2m', payload: ResizeDto })
export class ResizeImage implements Handler<ResizeDto, { bytes: number }> {
  handle({ payload }: Job<ResizeDto>): { bytes: number } {
    return { bytes: payload.path.length * (payload.width ?? 100) };
  }
}
// #endregion

// #region enqueue
@Injectable()
export class Images {
  constructor(private readonly jobs: JobsService) {}

  async added(path: string): Promise<string> {
    const id = await this.jobs.enqueue(ResizeImage, { path, width: 200 });
    await this.jobs.enqueue(ResizeImage, { path, width: 50 }, { delay: '10m', priority: 5, tags: ['thumbnail'] });
    await this.jobs.enqueueMany(
      ResizeImage,
      [400, 800].map((width) => ({ path, width })),
      { queue: 'large-images' },
    );
    return id;
  }
}
// #endregion

let db: TestDatabase;
beforeAll(async () => {
  db = await createTestDatabase({ name: 'guide-jobs' });
});
afterAll(() => db.drop());

it('docs/guide/jobs.md: enqueue, wait, read', async () => {
  const { app, jobs } = await startLeaseApp(db, { handlers: [ResizeImage, Images] });
  const id = await app.get(Images).added('a.png');
  // #region wait
  const job = await jobs.waitFor<typeof ResizeImage>(id, { timeout: '1m' });
  console.log(job.state, job.result?.bytes); // completed 1000
  // #endregion
  expect(job).toMatchObject({ state: 'completed', result: { bytes: 1000 } });
  // #region find
  const page = await jobs.find({ kind: 'image.resize', tag: 'thumbnail', state: 'scheduled' });
  const counts = await jobs.counts(); // { ready: 0, scheduled: 1, …, completed: 3, … }
  // #endregion
  expect(page.jobs).toHaveLength(1);
  expect(counts.scheduled).toBe(1);
  // #region invalid
  const error = await jobs.enqueue(ResizeImage, { path: 'a.png', width: 'wide' } as never).catch((e: unknown) => e);
  // InvalidJobError: … payload.width: width must be an integer number; error.field is 'payload.width'
  // #endregion
  expect(error).toMatchObject({ code: 'INVALID_JOB', field: 'payload.width' });
  // #region queues
  const queues = app.get(QueuesService);
  await queues.pause('large-images');
  await queues.configure('images', { deadline: '5m', weight: 3, ageing: '10m', retention: { completed: '1d' } });
  await queues.resume('large-images');
  // #endregion
  expect(await queues.get('images')).toMatchObject({ weight: 3, deadlineMs: 300_000 });
  await eventually(async () => (await jobs.counts()).completed === 3);
});

it('docs/guide/jobs.md: from SQL', async () => {
  const { jobs } = await startHandWorker(db, ['report.order']);
  const client = new Client({ connectionString: db.url });
  await client.connect();
  await client.query('CREATE TABLE orders (id int PRIMARY KEY)');
  const [, trigger = ''] = /^```sql\n([\s\S]*?)^```$/m.exec(readPage('docs/guide/jobs.md'))!;
  await client.query(trigger);
  await client.query('INSERT INTO orders VALUES (7)');
  await client.query('INSERT INTO orders VALUES (8)');
  await client.end();
  expect((await jobs.find({ kind: 'report.order' })).jobs.map(({ payload }) => payload)).toEqual([{ order: 7 }]);
});

it('docs/guide/jobs.md shows the code of this file', () =>
  expectPageShowsSpec('docs/guide/jobs.md', 'test/guide/jobs.spec.ts'));
