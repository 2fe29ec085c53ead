import './leave-with-parent';
import 'reflect-metadata';
import { NestFactory } from '@nestjs/core';
import { CONFIG, type ToWorker, type WorkerConfig } from './messages';
import { Pace } from './pace';
import { tellParent } from './tell-parent';
import { WorkerModule } from './worker.module';

async function main(): Promise<void> {
  const config = JSON.parse(process.env[CONFIG] ?? '{}') as WorkerConfig;
  const app = await NestFactory.createApplicationContext(WorkerModule.forRoot(config), {
    logger: ['error', 'fatal'],
    abortOnError: false,
  });
  // SIGTERM drains: stop claiming, finish or give back, sign off.
  app.enableShutdownHooks(['SIGTERM']);
  const pace = app.get(Pace);
  process.on('message', ({ ms }: ToWorker) => (pace.ms = ms));
  tellParent({ type: 'ready' });
}

main().catch((error: unknown) => {
  console.error(error instanceof Error ? error.message : error);
  process.exit(1);
});
