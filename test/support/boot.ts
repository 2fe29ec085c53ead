import { type INestApplicationContext, type ModuleMetadata, Module, type Type } from '@nestjs/common';
import { NestFactory } from '@nestjs/core';
import { LeaseModule, type LeaseOptions } from '@leasehold/nestjs';
import { QUICK } from './lease-app';
import type { TestDatabase } from './test-database';

/** A module class of a test's own. */
export function moduleOf(metadata: ModuleMetadata, Base: Type = class {}): Type {
  class TestModule extends Base {}
  Module(metadata)(TestModule);
  return TestModule;
}

/** `LeaseModule.forRoot` with the tests' quick times, on this database. */
export const leaseModule = (db: Pick<TestDatabase, 'url'>, options: Partial<LeaseOptions> = {}) =>
  LeaseModule.forRoot({ ...QUICK, connection: { url: db.url }, ...options });

const open = new Set<INestApplicationContext>();

/** Starts an application; closed after the test at the latest. */
export async function boot(root: Type): Promise<INestApplicationContext> {
  const app = await NestFactory.createApplicationContext(root, { logger: false, abortOnError: false });
  open.add(app);
  return app;
}

export async function close(app: INestApplicationContext): Promise<void> {
  if (open.delete(app)) await app.close();
}

/** What a boot says that must fail. */
export async function bootError(root: Type): Promise<Error> {
  let app: INestApplicationContext;
  try {
    app = await boot(root);
  } catch (error) {
    return error as Error;
  }
  await close(app);
  throw new Error('the application started');
}

export async function closeApps(): Promise<void> {
  for (const app of [...open]) await close(app);
}

if (typeof afterEach === 'function') afterEach(closeApps);
