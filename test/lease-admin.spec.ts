import { LeaseModule, JobsService } from '@leasehold/nestjs';
import { LeaseAdminModule } from '@leasehold/nestjs-admin';
import { type CanActivate, type ExecutionContext, Injectable, type INestApplication, Module } from '@nestjs/common';
import { NestFactory } from '@nestjs/core';
import type { Request } from 'express';
import { createTestDatabase, type TestDatabase } from './support';

interface Page {
  jobs: { id: string }[];
  next: string | null;
}

let database: TestDatabase;
let app: INestApplication;
let url: string;
let jobs: JobsService;

@Injectable()
class Password {
  readonly value = 'sesame';
}

@Module({ providers: [Password], exports: [Password] })
class PasswordModule {}

@Injectable()
class PasswordGuard implements CanActivate {
  constructor(private readonly password: Password) {}

  canActivate(context: ExecutionContext): boolean {
    return context.switchToHttp().getRequest<Request>().headers.authorization === this.password.value;
  }
}

beforeAll(async () => {
  database = await createTestDatabase();
  @Module({
    imports: [
      LeaseModule.forRoot({ role: 'producer', connection: { url: database.url }, migrate: true }),
      LeaseModule.forRoot({
        name: 'other',
        schema: 'other',
        role: 'producer',
        connection: { url: database.url },
        migrate: true,
      }),
      LeaseAdminModule.forRoot(),
      LeaseAdminModule.forRoot({
        path: 'ops/other',
        instance: 'other',
        guards: [PasswordGuard],
        imports: [PasswordModule],
      }),
    ],
  })
  class AppModule {
    // `app.get(JobsService)` would find either instance's.
    constructor(readonly jobs: JobsService) {}
  }
  app = await NestFactory.create(AppModule, { logger: ['error'], abortOnError: false });
  await app.listen(0, '127.0.0.1');
  url = await app.getUrl();
  jobs = app.get(AppModule).jobs;
});

afterAll(async () => {
  await app?.close();
  await database.drop();
});

async function get(path: string, headers: Record<string, string> = {}) {
  const response = await fetch(`${url}/${path}`, { headers });
  return { status: response.status, body: (await response.json()) as Page };
}

it('pages through jobs by filter, newest first', async () => {
  const ids = await jobs.enqueueMany([
    { handler: 'a', payload: {}, tags: ['x'] },
    { handler: 'a', payload: {}, tags: ['x'], queue: 'q' },
    { handler: 'b', payload: {}, delay: '1h' },
  ]);
  const first = await get('leasehold/jobs?tag=x&limit=1');
  expect(first).toMatchObject({ status: 200, body: { jobs: [{ id: ids[1] }], next: ids[1] } });
  expect((await get(`leasehold/jobs?tag=x&after=${first.body.next}`)).body).toMatchObject({ jobs: [{ id: ids[0] }] });
  expect((await get('leasehold/jobs?queue=q')).body.jobs).toHaveLength(1);
  expect((await get('leasehold/jobs?kind=b&state=scheduled')).body.jobs).toMatchObject([{ id: ids[2] }]);
  expect((await get('leasehold/jobs/counts')).body).toMatchObject({ ready: 2, scheduled: 1 });
  expect((await get(`leasehold/jobs/${ids[0]}`)).body).toMatchObject({ id: ids[0], state: 'ready', runs: [] });
  expect((await get('leasehold/kinds/unhandled')).body).toEqual({ kinds: ['a'] });
});

it('shows workers and the leader', async () => {
  expect(await get('leasehold/workers?active=true')).toEqual({ status: 200, body: { workers: [] } });
  expect(await get('leasehold/leader')).toMatchObject({ status: 200, body: { workerId: null, epoch: '0' } });
});

it.each([
  ['jobs?state=redy', 'state'],
  ['jobs?limit=0', 'limit'],
  ['jobs?limit=ten', 'limit'],
  ['jobs?limit=1001', 'limit'],
  ['jobs?after=-1', 'after'],
  ['jobs?after=9223372036854775808', 'after'],
  ['jobs?kind=', 'kind'],
  ['jobs?kind=a&kind=b', 'kind'],
  ['jobs?sate=ready', 'sate'],
  ['jobs/abc', 'id'],
  ['workers?active=maybe', 'active'],
])('refuses %s, naming the field', async (path, field) => {
  expect(await get(`leasehold/${path}`)).toEqual({
    status: 400,
    body: { code: 'INVALID_JOB', message: expect.stringContaining(field), field },
  });
});

it('answers 404 for a job that does not exist', async () => {
  expect(await get('leasehold/jobs/999999')).toEqual({
    status: 404,
    body: { code: 'UNKNOWN_JOB', message: 'There is no job 999999', jobId: '999999' },
  });
});

it('shows another instance at a path of its own, behind its guard', async () => {
  expect(await get('ops/other/jobs/counts')).toMatchObject({ status: 403 });
  expect(await get('ops/other/jobs/counts', { authorization: 'sesame' })).toMatchObject({
    status: 200,
    body: { ready: 0 },
  });
});
